"""The loss and the metrics of a model on data it does not learn from."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from anybatch.batches import Batch
from anybatch.gradients import shares_of, weighted_sum
from anybatch.objectives import Metrics, Objective, combine, count_units, loss_and_metrics, on_host
from anybatch.options import Reduction
from anybatch.parallel import ONE_PROCESS, Ranks
from anybatch.passes import ForwardPass
from anybatch.training.launch import reshard


@dataclass(frozen=True, slots=True)
class Validation:
    """The whole of the data, as if in one batch."""

    loss: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Seen:
    """One batch."""

    loss: Tensor
    metrics: Metrics
    units: float


def validate(
    model: nn.Module,
    objective: Objective,
    batches: Iterable[Batch],
    device: torch.device,
    *,
    ranks: Ranks = ONE_PROCESS,
    num_batches: int | None = None,
) -> Validation:
    """Evaluate without gradients, in eval mode; the mode is put back.

    Units weigh the batches, as in training; a loss that is a sum is given per unit. Ranks take the batches in turn. Batches
    beyond the first `num_batches` run, because a sharded model needs every rank in every forward, but do not count.
    """
    was_training = model.training
    own: list[_Seen] = []
    forward = ForwardPass(model=model, compute=objective.loss, device=device)
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                there = forward.load(batch)
                loss, metrics = loss_and_metrics(forward(there))
                units = count_units(objective, model, [there])[0]
                own.append(_Seen(loss.reshape(()).float(), metrics, units))
    finally:
        reshard(model)
        model.train(was_training)
    if ranks.size > 1:
        own = [_on_host(seen) for seen in own]
    in_turn = [seen for turn in zip(*ranks.gather_objects(own), strict=True) for seen in turn]
    return _put_together(in_turn[:num_batches], objective.reduction)


def _on_host(seen: _Seen) -> _Seen:
    return replace(seen, loss=seen.loss.cpu(), metrics=on_host(seen.metrics))


def _put_together(seen: list[_Seen], reduction: Reduction) -> Validation:
    units = [one.units for one in seen]
    counted = [one for one in seen if one.units > 0 or reduction == "sum"]
    weights = shares_of([one.units for one in counted], reduction)
    total = float(weighted_sum([one.loss for one in counted], weights))
    return Validation(
        loss=total / (sum(units) or 1.0) if reduction == "sum" else total,
        metrics={name: float(value) for name, value in combine([one.metrics for one in seen], units).items()},
    )
