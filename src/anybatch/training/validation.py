"""The loss and the metrics of a model on data it does not learn from."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.batches import Batch, move
from anybatch.gradients.metrics import combine
from anybatch.gradients.objective import Objective, count_units
from anybatch.gradients.shares import shares_of, weighted_sum


@dataclass(frozen=True, slots=True)
class Validated:
    """The whole of the data, as if in one batch."""

    loss: float
    metrics: Mapping[str, float]


def validate(model: nn.Module, objective: Objective, batches: Iterable[Batch], device: torch.device) -> Validated:
    """Evaluate without gradients, in eval mode; the mode is put back.

    Units weigh the batches, as in training; a loss that is a sum is given per unit.
    """
    was_training = model.training
    losses: list[Tensor] = []
    metrics: list[Any] = []
    units: list[float] = []
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                there = move(batch, device)
                returned = objective.loss(model, there)
                loss, numbers = returned if isinstance(returned, tuple) else (returned, {})
                losses.append(loss.reshape(()).float())
                metrics.append(numbers)
                units += count_units(objective, model, [there])
    finally:
        model.train(was_training)
    counted = [index for index, number in enumerate(units) if number > 0 or objective.reduction == "sum"]
    weights = shares_of([units[index] for index in counted], objective.reduction).each
    total = float(weighted_sum([losses[index] for index in counted], weights))
    return Validated(
        loss=total / (sum(units) or 1.0) if objective.reduction == "sum" else total,
        metrics={name: float(value) for name, value in combine(metrics, units).items()},
    )
