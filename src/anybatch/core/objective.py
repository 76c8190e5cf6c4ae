"""Objectives: a loss, the units it averages over, and its value for one micro-batch of a batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from anybatch.core.batch import Batch, rows
from anybatch.core.metrics import Mean, Metrics, Number
from anybatch.core.options import Reduction
from anybatch.display import called, name_of, short
from anybatch.errors import LossError, UnitsError

LossFunction = Callable[[nn.Module, Batch], "Tensor | tuple[Tensor, Metrics]"]
Units = Callable[[Batch], Number]
Encode = Callable[[nn.Module, Batch], Batch]
CoupledLoss = Callable[[Any], "Tensor | tuple[Tensor, Metrics]"]


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss as a function of (model, batch), and the units it averages over.

    The loss of a batch is `sum_k units_k * loss_k / sum_k units_k` over its micro-batches. This holds for the mean of a value
    per unit (row, token), and fails if rows depend on each other: use `Coupled` then.

    Args:
        loss: `loss(model, batch)` returns a mean loss, or `(mean loss, metrics)`.
        units: `units(batch)` returns the number that the mean divides by; rows by default.
        reduction: "mean", or "sum" if the loss is a sum: micro-batches add up, and `units` weight only the metrics.
        units_for: `units_for(model)` returns the units of this model, used instead of `units`.
        reduction_for: `reduction_for(model)` returns the reduction of this model, used instead of `reduction`.
        terms: Units of each term of a loss of several means; set by `Terms`.

    Raises:
        LossError: If `loss` or `units` is not a function, or `reduction` is unknown.

    Example:
        >>> objective = Objective(lambda model, x: (model(x) ** 2).mean())
        >>> objective.units(torch.zeros(8, 3))
        8
    """

    loss: LossFunction
    units: Units = rows
    reduction: Reduction = "mean"
    units_for: Callable[[nn.Module], Units] | None = None
    reduction_for: Callable[[nn.Module], Reduction] | None = None
    terms: Mapping[str, Units | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not callable(self.loss) or not callable(self.units):
            raise LossError(
                f"Objective(loss={self.loss!r}, units={self.units!r}): both must be functions, loss(model, batch) and "
                "units(batch). For a criterion such as nn.CrossEntropyLoss(), use supervised(criterion)."
            )
        if self.reduction not in ("mean", "sum"):
            raise LossError(f"Objective(reduction={self.reduction!r}): expected 'mean' or 'sum'.")

    def __repr__(self) -> str:
        options: dict[str, Any] = {} if self.units is rows else {"units": self.units}
        options |= {} if self.reduction == "mean" else {"reduction": self.reduction}
        options |= {"terms": tuple(self.terms)} if self.terms else {}
        return called("Objective", name_of(self.loss), **options)

    def parameters(self) -> list[nn.Parameter]:
        """Return no parameters: those of a criterion go to the optimizer, and to `Accumulator(parameters=...)`."""
        return []

    def whole(self) -> "Objective":
        """Return itself: this loss can be computed over any rows."""
        return self


@dataclass(frozen=True, slots=True)
class Coupled:
    """An objective with a loss over all rows at once, such as a contrastive loss.

    The representations of all rows fit in memory where the graph of all rows does not: each micro-batch runs forward twice,
    and backward once (GradCache). Exact for any loss, with dropout too: the second forward draws the same random numbers.
    Buffers advance once.

    Args:
        encode: `encode(model, micro_batch)` returns representations: a tensor or any nesting of tensors, rows first. Tensors
            without a gradient (labels) are allowed; a 0-dim tensor (a logit scale) must be equal for every micro-batch.
        loss: `loss(representations)` returns one number for all rows, or `(number, metrics)`. If it is a module, its
            parameters (a learned temperature) get their gradient too.
        units: `units(batch)` is reported as `result.units`; it does not weight the loss.

    Raises:
        LossError: If `encode` or `loss` is not a function.

    Example:
        >>> import torch
        >>> from anybatch import Accumulator
        >>> encode = lambda model, pair: (model(pair[0]), model(pair[1]))
        >>> objective = Coupled(encode, lambda pair: (pair[0] @ pair[1].T).var())
        >>> accumulator = Accumulator(nn.Linear(3, 2), objective, micro_batch=4)
        >>> accumulator.backward((torch.randn(10, 3), torch.randn(10, 3))).micro_batches
        3
    """

    encode: Encode
    loss: CoupledLoss
    units: Units = rows
    reduction: Literal["mean"] = field(default="mean", init=False)
    units_for: None = field(default=None, init=False)
    reduction_for: None = field(default=None, init=False)
    terms: Mapping[str, Units | None] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if not callable(self.encode) or not callable(self.loss):
            raise LossError(
                f"Coupled(encode={self.encode!r}, loss={self.loss!r}): both must be functions, encode(model, micro_batch) and "
                "loss(representations), for example Coupled(lambda model, pair: (model(pair[0]), model(pair[1])), info_nce())."
            )

    def __repr__(self) -> str:
        return called("Coupled", name_of(self.encode), short(self.loss))

    def parameters(self) -> list[nn.Parameter]:
        """Return the loss's own parameters, for the optimizer."""
        return list(self.loss.parameters()) if isinstance(self.loss, nn.Module) else []

    def whole(self) -> Objective:
        """Return the same loss as an objective of (model, batch), for a batch that is not cut."""
        return Objective(lambda model, batch: self.loss(self.encode(model, batch)), self.units)


def count_units(objective: Objective | Coupled, model: nn.Module, micro_batches: Sequence[Batch]) -> list[float]:
    """Count the units of each micro-batch, as Python numbers, before the first forward."""
    units = objective.units if objective.units_for is None else objective.units_for(model)
    counted = numbers_of([units(micro_batch) for micro_batch in micro_batches])
    for index, number in enumerate(counted):
        if not 0 <= number < float("inf"):
            raise UnitsError(
                f"micro-batch {index} has {number!r} units; units are what its mean loss divides by and must be a finite "
                "number, 0 or more. Check the function given as units=, and the class weights if there are any."
            )
    return counted


def count_terms(units: Mapping[str, Units | None], batch: Batch) -> list[float]:
    """Count the units of each term of a micro-batch's loss; a term without units counts 1."""
    return numbers_of([1 if count is None else count(batch) for count in units.values()])


def numbers_of(values: list[Number]) -> list[float]:
    """Convert counts to Python numbers, with one wait for the device."""
    for value in values:
        if not isinstance(value, Tensor | int | float):
            raise UnitsError(
                f"units(micro_batch) returned a {type(value).__name__}: {value!r:.60}; expected one number, what the mean "
                "loss divides by."
            )
        if isinstance(value, Tensor) and value.numel() != 1:
            raise UnitsError(
                f"units(micro_batch) returned a tensor of shape {tuple(value.shape)}; expected one number, what the mean loss "
                "divides by. Sum it, for example (labels != -100).sum()."
            )
    if values and all(isinstance(value, Tensor) and not value.is_cpu for value in values):
        return torch.stack([torch.as_tensor(value).reshape(()) for value in values]).tolist()
    return [value.item() if isinstance(value, Tensor) else value for value in values]


def checked_loss(returned: Any) -> tuple[Tensor, Metrics]:
    """Like `loss_and_metrics`, and check that the loss is a single differentiable number."""
    loss, metrics = loss_and_metrics(returned)
    if loss.dim() != 0:
        if loss.numel() != 1:
            raise LossError(
                f"the objective returned a loss of shape {tuple(loss.shape)}; expected one number. Reduce it to its mean, "
                "or for a criterion leave reduction='mean'."
            )
        loss = loss.reshape(())
    if not loss.requires_grad:
        raise LossError(
            "the loss does not depend on any parameter that requires a gradient. Check that the model is not frozen "
            "whole, and that the objective neither detaches its output nor runs under torch.no_grad()."
        )
    return loss, metrics


def loss_and_metrics(returned: Any) -> tuple[Tensor, Metrics]:
    """Unpack the result of a loss function over all rows: `loss` or `(loss, metrics)`."""
    if isinstance(returned, Tensor):
        return returned, {}
    if hasattr(returned, "of_whole"):
        returned = returned.of_whole()
    loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(loss, Tensor):
        raise LossError(
            f"the objective returned {type(loss).__name__} {loss!r:.80}; expected a tensor, or (tensor, metrics). "
            "Return the loss itself, without .item() or float()."
        )
    if not isinstance(metrics, Mapping):
        raise LossError(
            f"the objective returned (loss, {type(metrics).__name__}); expected (loss, metrics), metrics being a dict of "
            "names and numbers."
        )
    return loss, metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class TermPlace:
    """Units of a micro-batch and of its batch, counted before the first forward."""

    units: float
    total: float
    """Units of all micro-batches of all ranks."""
    terms: Sequence[float] = ()
    """Units of each term of the micro-batch's loss."""
    totals: Sequence[float] = ()
    """Units of each term in the whole batch."""


class PartLoss(NamedTuple):
    """Loss of one micro-batch, as a part of its batch's."""

    root: Tensor
    """Tensor that backward starts from, with the micro-batch's share."""
    loss: Tensor
    """Mean over `units`, which is reported."""
    metrics: Metrics
    units: float


def part_loss(returned: Any, place: TermPlace) -> PartLoss:
    """Unpack the result of a loss function over the rows of one micro-batch."""
    if isinstance(returned, TermLosses | SeenLoss):
        return returned.of_part(place)
    loss, metrics = checked_loss(returned)
    return PartLoss(loss, loss, metrics, place.units)


@dataclass(frozen=True, slots=True, kw_only=True)
class TermLosses:
    """Several mean losses of the same rows, each with units of its own.

    `loss = sum_t weight_t * mean_t`, and over the micro-batches k of a batch `mean_t = sum_k units_tk * mean_tk / sum_k
    units_tk`.
    """

    losses: Mapping[str, Tensor]
    weights: Mapping[str, float]
    units: Mapping[str, Units | None]
    metrics: Metrics
    batch: Batch

    def of_whole(self) -> tuple[Tensor, Metrics]:
        counts = {name: None if units is None else units(self.batch) for name, units in self.units.items()}
        means = {name: Mean(loss, 1.0 if counts[name] is None else counts[name]) for name, loss in self.losses.items()}
        return _summed(self.losses, self.weights), means | dict(self.metrics)

    def of_part(self, place: TermPlace) -> PartLoss:
        """Weight each term by its own units_t / total_t, and divide by units / total, which backward starts from."""
        factors, means = {}, {}
        for name, own, total in zip(self.losses, place.terms, place.totals, strict=True):
            means[name] = Mean(self.losses[name], own)
            if own > 0:  # a mean over nothing is nan, and so may its gradient be
                factors[name] = self.weights[name] * (own / total) * (place.total / place.units)
        counted = {name: self.losses[name] for name in factors}
        # rows without units run only for the other ranks: they need a graph, and backward starts from zero
        root = _summed(counted, factors) if counted else _summed(self.losses, self.weights)
        root, _ = checked_loss(root)
        return PartLoss(root, root, means | dict(self.metrics), place.units)


def _summed(losses: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    terms = [loss * weights[name] if weights[name] != 1.0 else loss for name, loss in losses.items()]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenLoss:
    """A mean loss, and the units that an observer saw it divide by."""

    loss: Tensor
    units: float
    metrics: Metrics

    def of_whole(self) -> tuple[Tensor, Metrics]:
        return self.loss, self.metrics

    def of_part(self, place: TermPlace) -> PartLoss:
        """Weight by the observed units instead of the counted ones; their sum is divided out at the end of the batch."""
        loss, _ = checked_loss(self.loss)
        reported = loss if self.units > 0 else torch.zeros_like(loss)
        loss = loss if self.units > 0 else loss.nan_to_num()  # a mean over nothing is nan
        return PartLoss(loss * (self.units / (place.units or 1.0)), reported, self.metrics, self.units)
