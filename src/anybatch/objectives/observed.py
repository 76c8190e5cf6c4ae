"""`observed(loss)`: units read off a loss while it runs, from the means it takes.

`ObservedMeans`, a function mode, sees them by the table in `anybatch.core.criteria`. `huggingface()` uses it as a check.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anybatch.core import (
    FUNCTIONAL_RULES,
    Batch,
    LossFunction,
    Number,
    Objective,
    Rule,
    SeenLoss,
    Units,
    class_units,
    element_units,
    kl_units,
    leaves_of,
    loss_and_metrics,
    numbers_of,
    places_behind,
    row_units,
    tensors,
    weighted_element_units,
)
from anybatch.errors import LossError, UnitsError


def observed(loss: LossFunction) -> Objective:
    """Make the objective of a mean loss whose units are read off it while it runs.

    It recognises torch's mean-reducing loss functions (ignored targets, class weights, elements) and a plain `.mean()` down to
    one number. The gradient is divided once, at the end of the batch, by the units of all micro-batches and ranks. Several
    means in one loss must have the same units, up to a constant factor; else use `Terms`. A loss that divides in another way
    (`loss.sum() / mask.sum()`, a fused kernel) is an error. Each micro-batch waits for the device once, to read its units, and
    all its torch functions are intercepted: about 15 % of a small pass.

    Args:
        loss: Function of (model, batch) that returns a mean loss, or `(mean loss, metrics)`.

    Returns:
        An objective for `Update` and `Accumulator`.

    Raises:
        LossError: If `loss` cannot be called.
        UnitsError: In an update, if no mean was seen, or means with units in different proportions.

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
    """A loss that returns its units too."""

    loss: LossFunction
    ratios: list[float] = field(default_factory=list)
    """Units of each mean relative to the first, from the first pass in which all means have units; only used to check."""

    def __call__(self, model: nn.Module, batch: Batch) -> SeenLoss:
        with ObservedMeans(plain=True) as means:
            returned = self.loss(model, batch)
        value, metrics = loss_and_metrics(returned)
        return SeenLoss(loss=value, units=common_units(numbers_of(means.units), self.ratios), metrics=metrics)


def common_units(units: list[float], ratios: list[float]) -> float:
    """Return the units that all means of a loss share. Sets `ratios`, if empty, to the units of each relative to the first."""
    if not units:
        raise UnitsError(
            "observed(loss): none of torch's mean-reducing functions ran in this loss, so what it divides by could not be "
            "seen. Give Objective(loss, units), with a function of the batch that counts it."
        )
    first = units[0]
    if not ratios and all(units):
        ratios.extend(one / first for one in units)
    if not any(units):
        return first
    seen = ", ".join(f"{one:g}" for one in units)
    if not ratios:
        raise UnitsError(
            f"observed(loss): the means in this loss divide by {seen}: one has nothing to average and another has. Use "
            "Terms(loss, units={...}), which divides each by its own."
        )
    expected = [first * ratio for ratio in ratios]
    if len(units) != len(ratios) or not all(map(partial(math.isclose, rel_tol=1e-6), units, expected)):
        raise UnitsError(
            f"observed(loss): the means in this loss divide by {seen}, in another proportion than before "
            f"({', '.join(f'{ratio:g}' for ratio in ratios)} of the first): each has units of its own, and no one number is "
            "exact. Use Terms(loss, units={...}), which divides each by its own."
        )
    return first


@dataclass(frozen=True, slots=True)
class LossCall:
    """One call of a mean-reducing loss function."""

    target: Tensor
    rule: Rule
    options: Any
    """Arguments of the call that its rule reads, by name."""

    @property
    def is_weighted(self) -> bool:
        return isinstance(getattr(self.options, "weight", None), Tensor)

    @property
    def is_countable(self) -> bool:
        """True if the units of any batch follow from its targets alone."""
        if self.rule is weighted_element_units:
            return not self.is_weighted
        if self.rule is kl_units:
            return bool(self.options.reduction == "mean")
        has_classes = self.rule in (class_units, row_units) and not self.target.is_floating_point()
        return self.rule is element_units or has_classes


_SIGNATURES = {function: inspect.signature(function) for function in FUNCTIONAL_RULES}
_READ_BY_RULES = ("weight", "ignore_index", "reduction", "target_lengths")


class ObservedMeans(TorchFunctionMode):
    """Function mode that records the divisor of every mean that torch's loss functions take.

    With `plain`, also of every `.mean()` down to one number that has a gradient.
    """

    def __init__(self, *, plain: bool = False) -> None:
        super().__init__()
        self._sees_plain = plain
        self.units: list[Number] = []
        self.means: list[Any] = []
        self.nodes: list[Any] = []
        """Graph nodes of the means."""
        self.calls: list[LossCall | None] = []
        """The loss function calls; None for a plain mean."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        units, call = None, None
        if func in FUNCTIONAL_RULES:
            call = _call_of(func, args, kwargs)
            units = None if call is None else call.rule(call.target, call.options)
        elif self._sees_plain and func in (torch.mean, Tensor.mean) and isinstance(result, Tensor):
            given = args[0] if args else kwargs["input"]
            units = given.numel() if result.dim() == 0 and result.requires_grad and given.dim() > 0 else None
        if units is not None:
            self.units.append(units)
            self.calls.append(call)
            self.means.append(result.detach().clone())  # a model may add to its loss in place
            self.nodes.append(result.grad_fn)
        return result


def _call_of(func: Any, args: Any, kwargs: Any) -> LossCall | None:
    """Describe the call of a loss function that took a mean; return None if it did not."""
    call = _SIGNATURES[func].bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    average, reduce = given.get("size_average"), given.get("reduce")  # torch's old names for the reduction
    is_old = average is not None or reduce is not None
    if (reduce is False or average is False) if is_old else given["reduction"] not in ("mean", "batchmean"):
        return None
    target = next(given[name] for name in ("target", "targets", "anchor") if name in given)
    options = SimpleNamespace(**{name: given[name] for name in _READ_BY_RULES if name in given})
    return LossCall(target, FUNCTIONAL_RULES[func], options)


def learned(loss: LossFunction) -> Objective:
    """Make the objective of a mean loss whose units are observed in its first batch and counted in later ones.

    Counting needs a loss with one mean, taken by one of torch's loss functions, whose target is a tensor of the batch, or one
    shifted by one. Units are then counted on that tensor, with the class weights and the ignored index of the call, and checked
    against the observed ones in every batch whose number is a power of two. Any other loss is observed in every batch, which
    costs 12 to 15 % of a small pass. A loss that adds anything else with a gradient to its means is refused.
    """
    units = LearnedUnits(loss)
    return Objective(units.compute, units.count)  # type: ignore[arg-type]


class LearnedUnits:
    """State of `learned`: how to count units, and whether this batch is observed. It changes no result."""

    def __init__(self, loss: LossFunction) -> None:
        self._loss = loss
        self._ratios: list[float] = []
        self._places: list[int] | None = None
        """Means that the loss is made of, by their number in the order they run."""
        self._counter: Units | None = None
        """Counts the units of a batch as the loss function was seen to do."""
        self._is_settled = False
        """True once a batch has shown whether units can be counted."""
        self._num_batches = 0
        self._has_run = True
        """A pass has run since units were last counted: the next count begins a batch."""
        self._is_watched = True

    def count(self, batch: Batch) -> Number:
        """Return 1: `compute` returns the units of a micro-batch, so that observed and counted batches are summed alike."""
        if self._has_run:
            self._has_run = False
            self._num_batches += 1
            self._is_watched = self._counter is None or self._num_batches & (self._num_batches - 1) == 0
        return 1

    def compute(self, model: nn.Module, batch: Batch) -> SeenLoss:
        """Return the loss of a micro-batch, and its units, counted or observed."""
        self._has_run = True
        if self._counter is not None and not self._is_watched:
            value, metrics = loss_and_metrics(self._loss(model, batch))
            return SeenLoss(loss=value, units=float(self._counter(batch)), metrics=metrics)
        with ObservedMeans(plain=True) as means:
            returned = self._loss(model, batch)
        value, metrics = loss_and_metrics(returned)
        places = self._places_of(value, means.nodes)
        units = common_units(numbers_of([means.units[place] for place in places]), self._ratios)
        self._learn(batch, [means.calls[place] for place in places], units)
        return SeenLoss(loss=value, units=units, metrics=metrics)

    def _places_of(self, loss: Tensor, nodes: list[Any]) -> Sequence[int]:
        if self._places is None and loss.requires_grad:
            self._places = places_behind(loss, nodes)
            own = [nodes[place] for place in self._places]
            if own and any(True for _ in leaves_of([loss], beyond=own)):
                raise UnitsError(
                    "this loss adds something to its mean that has a gradient and was not seen to be a mean (a penalty, a sum, "
                    "a router's balance). Give units=, a function of the batch that returns what the mean divides by, if what "
                    "is added does not depend on the rows."
                )
        places = self._places or []
        return places if loss.requires_grad and max(places, default=-1) < len(nodes) else range(len(nodes))

    def _learn(self, batch: Batch, calls: Sequence[LossCall | None], units: float) -> None:
        if self._counter is not None:
            counted = float(self._counter(batch))
            if abs(counted - units) > 1e-6 * max(units, 1.0):
                raise UnitsError(
                    f"this loss was seen to divide by {units:g}, where the targets of the micro-batch count {counted:g}, as "
                    "they did in the first batch: what it divides by has changed. Give units=, a function of the batch that "
                    "returns what the mean loss divides by."
                )
        elif not self._is_settled and units > 0:
            self._is_settled = True
            self._counter = None if len(calls) != 1 or calls[0] is None else _counter_of(batch, calls[0])


_SHIFTS: Sequence[Callable[[Tensor, int], Tensor]] = (
    lambda labels, ignored: labels,
    lambda labels, ignored: labels[..., 1:],
    lambda labels, ignored: F.pad(labels, (0, 1), value=ignored)[..., 1:],
)
"""Ways to make a target from a tensor of the batch: unchanged, without its first column, or shifted by one and padded."""


def _counter_of(batch: Batch, call: LossCall) -> Units | None:
    """Find the tensor of the batch that the target was made from; return a function that counts its units, or None."""
    if not call.is_countable:
        return None
    wanted = call.target.detach().flatten()
    rule, options, index = call.rule, call.options, getattr(call.options, "ignore_index", None)
    ignored = -100 if index is None else int(index)
    for number, tensor in enumerate(tensors(batch)):
        for shift in _SHIFTS[: 0 if tensor.dim() == 0 else 1 if tensor.dim() == 1 else None]:
            candidate = shift(tensor, ignored).flatten()
            is_like = candidate.shape == wanted.shape and candidate.device == wanted.device
            if is_like and torch.equal(candidate.to(wanted.dtype), wanted):
                return lambda batch: rule(shift(list(tensors(batch))[number], ignored), options)
    return None
