"""A few rows of a batch, as different from each other as it has them, in parts that differ most."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from anybatch.core import (
    Accumulator,
    Batch,
    Dealt,
    MicroBatches,
    Objective,
    Rows,
    SeenLoss,
    TermLosses,
    count_terms,
    count_units,
    has_rows,
    join_rows,
    loss_and_metrics,
    num_rows,
    take_rows,
    tensors,
)
from anybatch.errors import BatchError
from anybatch.objectives import ObservedMeans
from anybatch.ragged import Tokens

MOST_ROWS, FEWEST_ROWS = 8, 5
IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some rows of a sample."""

    rows: tuple[int, ...]
    """Their numbers in the sample."""
    batch: Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Some rows of a batch in one go, and ways to take them apart."""

    batch: Batch
    num_rows: int
    ways: tuple[tuple[Piece, ...], ...]
    """The first is that which shows most; another is for where a part of it has nothing to show."""


def choose_rows(accumulator: Accumulator, batch: Batch) -> Sample | str | None:
    """The rows to look at; what stands in the way, in words; None where the batch is not cut, and any loss is exact."""
    given = batch.batch if isinstance(batch, Dealt) else batch
    if (isinstance(batch, Dealt) and batch.is_stand_in) or not has_rows(given):
        return "this rank has no rows"
    is_alone = accumulator.engine.ranks.size == 1
    if isinstance(given, MicroBatches):
        if len(given) == 1:
            return None if is_alone else "it has one micro-batch"
        return whole_micro_batches(accumulator, given) or "its micro-batches cannot be joined to one"
    size = _size_of_micro_batches(accumulator, given)
    if size is None and is_alone:
        return None
    split = accumulator.split
    if getattr(split, "batch_dim", 0):
        return "its rows are not in dim 0"
    if getattr(split, "groups", None) is not None:
        return whole_micro_batches(accumulator, given) or "its groups cannot be joined to one micro-batch"
    collate = getattr(split, "collate", None)
    if collate is not None:
        samples = [given[row] for row in spread_evenly(len(given), _num_wanted(len(given), size or MOST_ROWS))]
        return _sample(collate(samples), len(samples)) or "the batch has one row"
    return _sample(given, size or MOST_ROWS, split) or "the batch has one row"


def whole_micro_batches(accumulator: Accumulator, batch: Batch, most: int = 3) -> Sample | None:
    """The first micro-batches as they will run, against one with all their rows; None where they cannot be joined.

    The first against all others, so that they differ in size; and each by itself.
    """
    given = batch.batch if isinstance(batch, Dealt) else batch
    cut = given if isinstance(given, MicroBatches) else copy.deepcopy(accumulator.split).cut(given)
    first, *others = sorted(cut, key=num_rows)[:most]
    if not others:
        return None
    try:
        ways = [[first, join_rows(others)], [first, *others]]
        whole = join_rows(ways[0])
    except BatchError:
        return None
    return Sample(batch=whole, num_rows=num_rows(whole), ways=tuple(_in_order(parts) for parts in ways))


def _in_order(parts: Sequence[Batch]) -> tuple[Piece, ...]:
    stops = [0, *accumulate(map(num_rows, parts))]
    return tuple(
        Piece(rows=tuple(range(start, stop)), batch=part)
        for part, (start, stop) in zip(parts, pairwise(stops), strict=True)
    )


def _size_of_micro_batches(accumulator: Accumulator, batch: Batch) -> int | None:
    """How many rows the first micro-batch will have; None where it has all of them."""
    split = accumulator.split
    if split == Rows(getattr(split, "size", 1)):  # with nothing that says what a row is
        return split.size if num_rows(batch) > split.size else None
    choose_for = getattr(split, "choose_for", None)
    if choose_for is not None:
        choose_for(accumulator.workload, batch)  # what the update begins with
    rows = copy.deepcopy(accumulator.split).cut(batch).row_numbers  # one that learns must not learn from this
    return len(rows[0]) if len(rows) > 1 else None


def _num_wanted(count: int, size: int) -> int:
    """Rows of one micro-batch, 8 at most; if it is small, 5, but never half of the batch."""
    wanted = max(FEWEST_ROWS, min(size, MOST_ROWS))
    return min(count, max(2, min(wanted, 2 * count // 5)))


def _sample(batch: Batch, size: int, split: object = None) -> Sample | None:
    count = num_rows(batch)
    wanted = _num_wanted(count, size) if split is not None else count
    if wanted < 2:
        return None
    order = by_kind(batch, count)
    chosen = take_rows(batch, [order[place] for place in spread_evenly(count, wanted)])
    few = 2 if wanted > 3 else 1
    numbers = range(wanted)
    mixed = tuple(numbers[1::3]) if wanted > 3 else (wanted - 1,)
    rest = tuple(number for number in numbers if number not in mixed)
    ways = [(tuple(numbers[:few]), tuple(numbers[few:])), (mixed, rest)]
    return Sample(
        batch=chosen,
        num_rows=wanted,
        ways=tuple(tuple(piece for rows in way for piece in _pieces(chosen, rows, split)) for way in ways),
    )


def _pieces(sample: Batch, rows: Sequence[int], split: object) -> list[Piece]:
    """These rows; cut by tokens, as the split trims them."""
    part = take_rows(sample, list(rows))
    if not isinstance(split, Tokens):
        return [Piece(rows=tuple(rows), batch=part)]
    split = copy.deepcopy(split)
    split._has_warned = True
    cut = split.cut(part)
    places = zip(cut.row_numbers, cut, strict=True)
    return [Piece(rows=tuple(rows[number] for number in numbers), batch=trimmed) for numbers, trimmed in places]


def spread_evenly(count: int, wanted: int) -> list[int]:
    """Numbers from the first to the last, evenly."""
    wanted = min(wanted, count)
    return [round(index * (count - 1) / max(wanted - 1, 1)) for index in range(wanted)]


def by_kind(batch: Batch, count: int) -> list[int]:
    """The rows sorted by what a count may depend on: entries that are ignored, that are 0, then classes, then weights."""
    columns = [column.detach().reshape(count, -1) for column in tensors(batch) if column.dim() and len(column) == count]
    columns = [column for column in columns if column.numel() and not column.is_complex()]
    whole = [column for column in columns if not column.is_floating_point()]
    narrow = [column for column in columns if column.is_floating_point() and column.shape[1] == 1]
    keys = [_sum([(column == IGNORED).sum(1) for column in whole], count)]
    keys += [_sum([(column == 0).sum(1) for column in whole], count)]
    keys += [_sum([column.sum(1) for column in whole], count), _sum([column.sum(1) for column in narrow], count)]
    return sorted(range(count), key=list(zip(*keys, strict=True)).__getitem__)


def _sum(each: list[Tensor], count: int) -> list[float]:
    if not each:
        return [0.0] * count
    total = torch.stack([one.to(torch.float64 if one.device.type != "mps" else torch.float32) for one in each]).sum(0)
    listed: list[float] = total.tolist()
    return listed


AddsUp = Literal["mean", "sum", "once"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One loss, and how those of parts make that of the whole."""

    name: str
    value: float
    units: float
    adds_up: AddsUp
    seen: float | None = None
    """Divisor of the loss, if the loss is exactly one of torch's means."""


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
    """The divisors of the parts are in another proportion than their units."""


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
    """The representations of these rows."""
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
