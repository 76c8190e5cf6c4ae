"""Objectives: how a loss is made, and what it averages over."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from anybatch.batches import Batch, rows
from anybatch.errors import LossError, UnitsError
from anybatch.faces import called, name_of
from anybatch.objectives.metrics import Metrics, Number
from anybatch.options import Reduction

Loss = Callable[[nn.Module, Batch], "Tensor | tuple[Tensor, Metrics]"]
Units = Callable[[Batch], Number]


@dataclass(frozen=True, slots=True)
class Objective:
    """A pure function of (model, batch): a loss, and the units it averaged over.

    `loss(model, batch)` returns a mean loss, or `(mean loss, metrics)`; `units(batch)` says how many it averaged.
    With `reduction="sum"` the loss is a sum: micro-batches add up, and `units` only weight the metrics.

    >>> objective = Objective(lambda model, x: (model(x) ** 2).mean())
    >>> objective.units(torch.zeros(8, 3))
    8
    """

    loss: Loss
    units: Units = rows
    reduction: Reduction = "mean"
    units_for: Callable[[nn.Module], Units] | None = None
    """For objectives whose units depend on the model: the units of this model, used instead of `units`."""
    reduction_for: Callable[[nn.Module], Reduction] | None = None
    """For objectives whose reduction depends on the model: that of this model, used instead of `reduction`."""
    terms: Mapping[str, Units | None] = field(default_factory=dict)
    """For losses of several means (`Terms`): what each divides by; `units` are then those of the micro-batch as a whole."""

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
        """None of its own: those of a criterion are given to the optimizer, and to `Accumulator` by `parameters=`."""
        return []

    def whole(self) -> "Objective":
        """Itself: this loss can be computed of any rows."""
        return self


class Counted(Protocol):
    """Whatever says what its loss averages over."""

    @property
    def units(self) -> Units: ...
    @property
    def units_for(self) -> Callable[[nn.Module], Units] | None: ...


def count_units(objective: Counted, model: nn.Module, micro_batches: Sequence[Batch]) -> list[float]:
    """The units of each micro-batch as Python numbers: counted before the first forward."""
    units = objective.units if objective.units_for is None else objective.units_for(model)
    counted = numbers_of([units(micro_batch) for micro_batch in micro_batches])
    for index, number in enumerate(counted):
        if not 0 <= number < float("inf"):
            raise UnitsError(
                f"micro-batch {index} has {number!r} units; units are what its mean loss divides by and must be a finite "
                "number, 0 or more. Check the function given as units=, and the class weights if there are any."
            )
    return counted


def checked_loss(returned: Any) -> tuple[Tensor, Metrics]:
    """The same as `loss_and_metrics`, and the loss is checked to be a single differentiable number."""
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
    """What a loss function returned for all rows that there are, `loss` or `(loss, metrics)`, taken apart."""
    of_whole = getattr(returned, "of_whole", None)
    if of_whole is not None:
        returned = of_whole()
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


def numbers_of(values: list[Number]) -> list[float]:
    """Counts as Python numbers; of several on a device, with one wait for it."""
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
        # one wait for the device instead of one per micro-batch
        return torch.stack([torch.as_tensor(value).reshape(()) for value in values]).tolist()
    return [value.item() if isinstance(value, Tensor) else value for value in values]
