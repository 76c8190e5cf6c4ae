"""`observed(loss)`: units that nobody counts, because they are seen while the loss runs."""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anybatch.batches import Batch
from anybatch.errors import LossError, UnitsError
from anybatch.objectives.criteria import FUNCTIONAL_RULES, Rule, element_units, row_units
from anybatch.objectives.metrics import Number
from anybatch.objectives.objective import Loss, Objective, loss_and_metrics, numbers_of
from anybatch.objectives.part_losses import SeenLoss

MEANS: Mapping[Any, Rule] = {
    **FUNCTIONAL_RULES,
    F.poisson_nll_loss: element_units,
    F.gaussian_nll_loss: element_units,
    F.soft_margin_loss: element_units,
    F.hinge_embedding_loss: element_units,
    F.margin_ranking_loss: element_units,
    F.kl_div: element_units,
    F.multilabel_margin_loss: row_units,
    F.multilabel_soft_margin_loss: row_units,
    F.multi_margin_loss: row_units,
    F.cosine_embedding_loss: row_units,
}
"""What torch's mean-reducing loss functions divide by, counted on their target."""
_SIGNATURES = {function: inspect.signature(function) for function in MEANS}
_PLAIN_MEANS = (torch.mean, Tensor.mean)


@dataclass(frozen=True, slots=True)
class LossCall:
    """One call of a mean-reducing loss function: its target, and how its units are counted on it."""

    target: Tensor
    rule: Rule
    options: "_Options"

    @property
    def ignored(self) -> int:
        return -100 if self.options.ignore_index is None else int(self.options.ignore_index)

    @property
    def is_element_wise(self) -> bool:
        return self.rule is element_units

    def units_of(self, target: Tensor) -> Number:
        return self.rule(target, self.options)


class SeenMeans(TorchFunctionMode):
    """Inside this block, `units` collects what every mean down to one number divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.units: list[Number] = []
        self.calls: list[LossCall | None] = []
        """By which loss function each was taken; None for a plain mean."""
        self.nodes: list[Any] = []
        """Where each is in the graph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in MEANS:
            self._see_loss(func, args, kwargs, result)
        elif func in _PLAIN_MEANS and isinstance(result, Tensor) and result.dim() == 0 and result.requires_grad:
            given = args[0] if args else kwargs["input"]
            if given.dim() > 0:
                self._see(given.numel(), None, result)
        return result

    def _see(self, units: Number, call: LossCall | None, mean: Tensor) -> None:
        self.units.append(units)
        self.calls.append(call)
        self.nodes.append(mean.grad_fn)

    def _see_loss(self, func: Any, args: Any, kwargs: Any, mean: Tensor) -> None:
        call = _SIGNATURES[func].bind(*args, **kwargs)
        call.apply_defaults()
        options = call.arguments
        rule = {"batchmean": row_units, "mean": MEANS[func]}.get(options["reduction"])
        if rule is not None:
            call_seen = LossCall(options["target"], rule, _Options(options))
            self._see(call_seen.units_of(options["target"]), call_seen, mean)


class _Options:
    """The options of a call, as a criterion has them."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.weight = given.get("weight")
        self.ignore_index = given.get("ignore_index", -100)


def observed(loss: Loss) -> Objective:
    """The objective of a mean loss whose units are seen while it runs: nothing is counted by the user.

    What torch's mean-reducing loss functions divided by is seen (ignored targets, class weights, elements), and so is a plain
    `.mean()` down to one number. The gradient is summed with what was seen, and divided once, at the close of the batch, by the
    sum over all micro-batches and ranks. Several means in one loss must be over the same units, up to a constant
    factor; where they are not, no one number is exact: an error says so, and `Terms` is for that. A loss that divides in
    another way (`loss.sum() / mask.sum()`, a fused kernel) shows nothing, and is an error too. Each micro-batch waits for the
    device once, to read its units, and every torch function in it is looked at: some 15 % of a small pass.

    >>> from anybatch import Accumulator
    >>> def loss(model, batch):
    ...     return F.cross_entropy(model(batch[0]), batch[1])
    >>> targets = torch.tensor([0, 1, -100, 1, -100])
    >>> Accumulator(nn.Linear(3, 2), observed(loss), micro_batch=2).backward((torch.randn(5, 3), targets)).units
    3
    """
    if not callable(loss):
        raise LossError(f"observed({loss!r:.60}): expected a function loss(model, batch) that returns a mean loss.")
    return Objective(WatchedLoss(loss))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class WatchedLoss:
    """A loss whose means are watched while it runs."""

    loss: Loss
    ratios: list[float] = field(default_factory=list)
    """How the means in it relate, from the first pass in which all had something to average; it changes no result."""

    def __call__(self, model: nn.Module, batch: Batch) -> SeenLoss:
        with SeenMeans() as means:
            returned = self.loss(model, batch)
        value, metrics = loss_and_metrics(returned)
        return SeenLoss(loss=value, units=common_units(numbers_of(means.units), self.ratios), metrics=metrics)


def common_units(units: list[float], ratios: list[float]) -> float:
    """The units that all means in a loss share; `ratios` is how each relates to the first."""
    if not units:
        raise UnitsError(
            "observed(loss): none of torch's mean-reducing functions ran in this loss, so what it divides by could not be "
            "seen. Give Objective(loss, units), with a function of the batch that counts it."
        )
    first = units[0]
    if not ratios and all(units):
        ratios.extend(one / first for one in units)
    is_same = (not any(units)) or (
        len(units) == len(ratios)
        and all(math.isclose(one, first * ratio, rel_tol=1e-6) for one, ratio in zip(units, ratios, strict=True))
    )
    if ratios and not is_same:
        raise UnitsError(
            f"observed(loss): the means in this loss divide by {', '.join(f'{one:g}' for one in units)}, in another proportion "
            f"than before ({', '.join(f'{ratio:g}' for ratio in ratios)} of the first): each has units of its own, and no one "
            "number is exact. Use Terms(loss, units={...}), which divides each by its own."
        )
    if not ratios and any(units):
        raise UnitsError(
            f"observed(loss): the means in this loss divide by {', '.join(f'{one:g}' for one in units)}: one has nothing to "
            "average and another has. Use Terms(loss, units={...}), which divides each by its own."
        )
    return first
