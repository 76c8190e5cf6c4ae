"""What a forward of some rows shows: its losses, what each divides by; or representations, row by row."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from anybatch.batches import Batch, tensors
from anybatch.objectives import (
    Objective,
    ObservedMeans,
    SeenLoss,
    TermLosses,
    count_terms,
    count_units,
    loss_and_metrics,
)

AddsUp = Literal["mean", "sum", "once"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One loss, and how those of parts make that of the whole."""

    name: str
    value: float
    units: float
    adds_up: AddsUp
    seen: float | None = None
    """What the loss was seen to divide by, where it is nothing but one of torch's means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One forward."""

    values: tuple[Value, ...] = ()
    rows: tuple[Tensor, ...] = ()
    """Representations, in float64 on the CPU."""
    dtype: torch.dtype = torch.float32
    """The coarsest that was computed in."""

    @property
    def is_finite(self) -> bool:
        """True where every loss that counts for something is a number."""
        return all(math.isfinite(one.value) for one in self.values if one.units > 0 or one.adds_up != "mean")

    @property
    def shows(self) -> bool:
        """True where every loss is over something, and not zero by chance."""
        return all(one.units > 0 and one.value != 0 for one in self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far the parts are from the whole, in one loss."""

    name: str
    error: float
    """|put together - whole| / the larger of the two."""
    whole: float
    together: float
    is_sum: bool = False
    """The losses of the parts add up as they are."""
    is_between: bool = False
    """The whole is some weighted mean of the parts."""
    units_differ: bool = False
    """What the loss was seen to divide by is in another proportion than the units."""


def measure(objective: Objective, model: nn.Module, batch: Batch, returned: Any, observed: ObservedMeans) -> Measured:
    """The losses that an objective returned for these rows."""
    if isinstance(returned, TermLosses):
        counts = count_terms(returned.units, batch)
        kinds = zip(returned.losses.items(), counts, returned.units.values(), strict=True)
        values = [
            Value(name=name, value=float(loss.detach()), units=count, adds_up="once" if units is None else "mean")
            for (name, loss), count, units in kinds
        ]
        return Measured(values=tuple(values), dtype=next(iter(returned.losses.values())).dtype)
    loss, _ = loss_and_metrics(returned)
    value = float(loss.detach().double() if loss.device.type != "mps" else loss.detach())
    if isinstance(returned, SeenLoss):
        return Measured(
            values=(Value(name="loss", value=value, units=returned.units, adds_up="mean"),), dtype=loss.dtype
        )
    (units,) = count_units(objective, model, [batch])
    seen = None
    if len(observed.means) == 1 and value == float(observed.means[0]):
        seen = float(observed.units[0])
    reduction = objective.reduction if objective.reduction_for is None else objective.reduction_for(model)
    return Measured(
        values=(Value(name="loss", value=value, units=units, adds_up=reduction, seen=seen),), dtype=loss.dtype
    )


def measure_rows(representations: Batch) -> Measured:
    """What an encoder returned for these rows."""
    held = [tensor.detach() for tensor in tensors(representations) if tensor.is_floating_point() and tensor.dim() > 0]
    dtype = held[0].dtype if held else torch.float32
    return Measured(rows=tuple(tensor.to("cpu", torch.float64) for tensor in held), dtype=dtype)


def differences(whole: Measured, parts: Sequence[Measured], order: Sequence[int]) -> list[Difference]:
    """Whole against parts, loss by loss, or for representations tensor by tensor; `order` is the rows of the parts."""
    if whole.rows or any(part.rows for part in parts):
        return [
            _of_rows(index, whole.rows[index], [part.rows[index] for part in parts], order)
            for index in range(len(whole.rows))
        ]
    return [_of_values(one, [part.values[index] for part in parts]) for index, one in enumerate(whole.values)]


def _of_values(whole: Value, parts: list[Value]) -> Difference:
    counted = [part for part in parts if part.units > 0 or whole.adds_up != "mean"]
    total = sum(part.units for part in counted)
    if whole.adds_up == "once":
        furthest = max(parts, key=lambda part: abs(part.value - whole.value))
        return _difference(whole, furthest.value, max(abs(whole.value), abs(furthest.value)), parts)
    weights = [part.units / total if whole.adds_up == "mean" and total else 1.0 for part in counted]
    together = sum(weight * part.value for weight, part in zip(weights, counted, strict=True))
    size = sum(abs(weight * part.value) for weight, part in zip(weights, counted, strict=True))
    return _difference(whole, together, max(abs(whole.value), size), parts)


def _difference(whole: Value, together: float, scale: float, parts: list[Value]) -> Difference:
    values = [part.value for part in parts]
    return Difference(
        name=whole.name,
        error=abs(together - whole.value) / scale if scale else 0.0,
        whole=whole.value,
        together=together,
        is_sum=math.isclose(sum(values), whole.value, rel_tol=1e-4),
        is_between=min(values) <= whole.value <= max(values),
        units_differ=whole.adds_up == "mean" and _are_units_other(parts),
    )


def _are_units_other(parts: list[Value]) -> bool:
    """True where units and what was seen are not in one proportion: whatever the losses happen to be, it is not exact."""
    if any(part.seen is None for part in parts):
        return False
    units, seen = sum(part.units for part in parts), sum(part.seen or 0.0 for part in parts)
    if not units or not seen:
        return False
    return any(abs(part.units / units - (part.seen or 0.0) / seen) > 1e-6 for part in parts)


def _of_rows(index: int, whole: Tensor, parts: list[Tensor], order: Sequence[int]) -> Difference:
    together = torch.cat(parts) if all(part.shape[1:] == whole.shape[1:] for part in parts) else whole[:0]
    name = f"representation {index}"
    if len(together) != len(whole) or len(whole) != len(order) or not bool(whole.isfinite().all()):
        return Difference(name=name, error=0.0, whole=0.0, together=0.0)  # not one entry per row: nothing to compare
    apart = (together - whole[list(order)]).norm()
    scale = float(whole.norm())
    return Difference(
        name=name,
        error=float(apart) / scale if scale else 0.0,
        whole=scale,
        together=float(together.norm()),
    )
