"""`BatchPlan`: everything about a batch that is decided before its first forward."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from anybatch.core.batch import Batch, move, rows, tensors
from anybatch.core.objective import Coupled, Objective, TermPlace, count_terms, count_units
from anybatch.core.options import Reduction
from anybatch.core.parallelism import Ranks
from anybatch.core.splits import Cut, MicroBatches
from anybatch.errors import BatchError, ParallelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward and backward."""

    micro_batch: int
    """Its number in the cut of this rank."""
    share: float
    """What its loss weighs in the batch's loss; 0.0: it runs for others, because other ranks run or its rows are looked at."""
    reports: bool
    """False: its loss and metrics are counted elsewhere, or nowhere."""
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The passes of one batch on this rank, in agreement with all ranks; one process is a group of one."""

    cut: MicroBatches
    """This rank's micro-batches; a borrowed one is the last, and holds none of its rows."""
    units: Sequence[float]
    """What each micro-batch's mean loss divides by."""
    passes: tuple[Pass, ...]
    left_out: tuple[int, ...]
    """The micro-batches of this rank that do not run, because they have no units."""
    num_left_out: int = 0
    """The most that any rank has of these."""
    denominator: float
    """Shares are `units / denominator`."""
    total: float
    """The units of the whole batch, of all ranks."""
    reduction: Reduction
    num_by_rank: tuple[int, ...]
    """How many micro-batches of its own each rank has; 0 for a rank with no row."""
    rank: int = 0
    is_proven: bool = True
    """True where each rank's last pass is known to fit, from one that was no smaller."""
    terms: "TermUnits" = field(default_factory=lambda: TermUnits())

    @property
    def is_empty(self) -> bool:
        """True of a mean over 0 units, of all ranks: its gradient is zero."""
        return self.reduction == "mean" and self.total == 0

    @property
    def num_own(self) -> int:
        """The micro-batches of this rank's own rows."""
        return self.num_by_rank[self.rank]

    @property
    def num_micro_batches(self) -> int:
        """The micro-batches of all ranks."""
        return sum(self.num_by_rank)

    @property
    def micro_batches(self) -> list[int]:
        """The numbers of the micro-batches that run, each once, in order."""
        return list(dict.fromkeys(one.micro_batch for one in self.passes))

    @property
    def units_seen(self) -> float:
        """The units of all rows that a loss over all ranks sees: without what was dropped, which only one process does."""
        return self.total if len(self.num_by_rank) > 1 else sum(self.units[index] for index in self.micro_batches)

    def number(self, rank: int, micro_batch: int) -> int:
        """The number of a rank's micro-batch among those of all ranks."""
        return sum(self.num_by_rank[:rank]) + micro_batch

    def weights(self, factor: float) -> list[float]:
        """What each pass's loss is multiplied by, where every share is multiplied by `factor`."""
        if self.reduction == "sum":
            return [factor if one.share else 0.0 for one in self.passes]
        denominator = self.denominator or 1.0
        return [factor * self.units[one.micro_batch] / denominator if one.share else 0.0 for one in self.passes]

    def place(self, micro_batch: int) -> TermPlace:
        """What a micro-batch is in the batch."""
        units = self.units[micro_batch]
        if not self.terms.each:
            return TermPlace(units=units, total=self.total)
        return TermPlace(
            units=units, total=self.terms.rows, terms=self.terms.each[micro_batch], totals=self.terms.totals
        )

    def left_over(self, counted: float) -> float:
        """What the summed gradient is multiplied by at the close, when only `counted` units, of all ranks, went into it."""
        return 1.0 if self.reduction == "sum" or counted == 0 else self.denominator / counted

    def without(self, micro_batches: Collection[int]) -> "BatchPlan":
        """The same batch without the passes of these micro-batches; without any, where none is left that counts."""
        left = [one for one in self.passes if one.micro_batch not in micro_batches]
        if not any(one.share for one in left):
            left = []
        passes = tuple(replace(one, is_last=one is left[-1]) for one in left)
        return replace(self, passes=passes, terms=self.terms.without(micro_batches, self.units))


@dataclass(frozen=True, slots=True, kw_only=True)
class TermUnits:
    """The units of a loss of several means, each with its own; none for a loss of one mean."""

    each: Sequence[Sequence[float]] = ()
    """For each micro-batch of this rank, what each term divides by."""
    totals: Sequence[float] = ()
    """What each term divides by in the whole batch, over all ranks."""
    rows: float = 0.0
    """The rows of the whole batch that count for any term."""

    def without(self, micro_batches: Collection[int], units: Sequence[float]) -> "TermUnits":
        """Where these micro-batches have no part in the batch; each is left out once."""
        lost = [index for index in micro_batches if self.each and any(self.each[index])]
        each = [() if index in lost else one for index, one in enumerate(self.each)]
        totals = [total - sum(self.each[index][term] for index in lost) for term, total in enumerate(self.totals)]
        return replace(self, each=each, totals=totals, rows=self.rows - sum(units[index] for index in lost))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which micro-batches a schedule runs, and in which order."""

    runs_all: bool = False
    """Micro-batches of 0 units run too, because other rows look at theirs."""
    repeats_first: bool = False
    """What runs only because other ranks run comes first, not last."""


def lay_out(
    units: Sequence[float], reduction: Reduction, layout: Layout, *, denominator: float, num_own: int, num_passes: int
) -> tuple[Pass, ...]:
    """The passes of a rank with these micro-batches, of which the first `num_own` are its own; at least `num_passes` of them.

    A mean over 0 units has no gradient and may be nan, so it is left out unless the layout runs all. When all have 0 units
    the last one runs even so, for the zero gradients of the parameters that it touches.
    """
    is_sum = reduction == "sum"
    if layout.runs_all or (is_sum and num_own == len(units)):
        running = range(len(units))
    else:
        running = [index for index, one in enumerate(units) if one > 0] or [len(units) - 1]  # type: ignore[assignment]
    divisor, last = denominator or 1.0, running[-1]
    missing = max(num_passes - len(running), 0)
    ends_again = missing > 0 and not layout.repeats_first
    passes = [
        Pass(
            micro_batch=index,
            share=0.0 if index >= num_own else 1.0 if is_sum else units[index] / divisor,
            reports=index < num_own,
            is_last=index == last and not ends_again,
        )
        for index in running
    ]
    again = [
        Pass(micro_batch=last, share=0.0, reports=False, is_last=ends_again and number == missing)
        for number in range(1, missing + 1)
    ]
    return tuple(again + passes if layout.repeats_first else passes + again)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRows:
    """What one rank has of a batch: cut, and its units counted."""

    cut: MicroBatches | None = None
    """None where it has no rows."""
    units: Sequence[float] = ()
    reduction: Reduction = "mean"
    terms: Sequence[Sequence[float]] = ()
    """What each term of a loss of several means divides by, for each micro-batch."""

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches of this rank; 0 where it has no rows."""
        return 0 if self.cut is None else len(self.cut)

    def counted(self, layout: Layout) -> list[int]:
        """The micro-batches that count for something, and so run."""
        if layout.runs_all or self.reduction == "sum":
            return list(range(len(self.units)))
        return [index for index, units in enumerate(self.units) if units > 0]


@dataclass(frozen=True, slots=True)
class _Told:
    """What one rank tells the others of its rows, as numbers that one small collective carries."""

    has_failed: float
    num_own: float
    num_counted: float
    total: float
    largest: float
    is_proven: float
    terms: Sequence[float] = ()
    """What each term of the loss divides by, on this rank."""


def has_rows(batch: Batch) -> bool:
    """False of None, and of a batch all of whose tensors have 0 rows: what a rank is given when there are too few for all."""
    counts = [len(tensor) for tensor in tensors(batch) if tensor.dim() > 0] if batch is not None else [0]
    return not counts or any(counts)


def count_rows(
    objective: Objective | Coupled, model: nn.Module, cut: MicroBatches | None, *, is_stand_in: bool
) -> OwnRows:
    """Count the units of this rank's micro-batches. A stand-in for no rows is a mean over nothing, of a sum too."""
    reduction = objective.reduction if objective.reduction_for is None else objective.reduction_for(model)
    if cut is None:
        return OwnRows(cut=None, units=(), reduction=reduction)
    units = units_of(objective, model, cut)
    each = [count_terms(objective.terms, part) for part in cut.micro_batches] if objective.terms else []
    if is_stand_in:
        nothing = [[0.0] * len(one) for one in each]
        return OwnRows(cut=cut, units=[0] * len(units), reduction="mean", terms=nothing)
    return OwnRows(cut=cut, units=units, reduction=reduction, terms=each)


def units_of(objective: Objective | Coupled, model: nn.Module, cut: MicroBatches) -> Sequence[float]:
    """What each micro-batch's loss averages over; rows as they were cut, in whatever dim micro-batches have them."""
    if objective.units is rows and objective.units_for is None and cut.cut is not None:
        return [len(numbers) for numbers in cut.cut.rows]
    return count_units(objective, model, cut.micro_batches)


def size_of(micro_batch: Batch) -> int:
    """The numbers in its tensors: of two micro-batches of one batch, the one that needs more memory has more."""
    return sum(tensor.numel() for tensor in tensors(micro_batch))


def plan_batch(
    ranks: Ranks,
    own: OwnRows,
    layout: Layout,
    *,
    even_passes: bool,
    underflows: bool,
    proven_size: int,
    num_terms: int = 0,
    error: Exception | None = None,
) -> BatchPlan:
    """Sum the units over all ranks in one small collective, and lay out this rank's passes.

    `error` is what cutting or counting raised on this rank: then every rank raises. With `even_passes`, each rank runs as
    many passes as the one with the most. A rank with nothing that counts borrows a micro-batch, to run it with share 0,
    because it has to take part in what all ranks do.

    Where gradients are fp16 and nothing scales the loss, shares of the whole batch would underflow in backward (measured: 0.23
    off at 64 micro-batches). There (`underflows`) the largest micro-batch has share 1, and the rest is divided out at the
    close. A pass no larger than `proven_size` is known to fit.
    """
    if ranks.size == 1:
        return _planned(ranks, own, [_told(own, [], is_proven=True)], layout, 0, underflows)
    told = _ask_all(ranks, own, error, layout, proven_size, num_terms)
    if not any(one.num_own for one in told):
        raise BatchError(f"this batch has no rows on any of its {ranks.size} ranks. Give at least one row, or skip it.")
    own = _with_borrowed(ranks, own, told, layout)
    num_passes = max(int(one.num_counted) for one in told) if even_passes else 0
    return _planned(ranks, own, told, layout, num_passes, underflows)


def _told(own: OwnRows, counted: list[int], *, is_proven: bool) -> _Told:
    terms = [sum(column) for column in zip(*own.terms, strict=True)]
    return _Told(0.0, own.num_micro_batches, len(counted), sum(own.units), max(own.units, default=0), is_proven, terms)


def _planned(
    ranks: Ranks, own: OwnRows, told: list[_Told], layout: Layout, num_passes: int, underflows: bool
) -> BatchPlan:
    assert own.cut is not None
    total = sum(one.total for one in told)
    denominator = max(one.largest for one in told) if underflows else total
    num_by_rank = tuple(int(one.num_own) for one in told)
    num_own = num_by_rank[ranks.rank]
    passes = lay_out(own.units, own.reduction, layout, denominator=denominator, num_own=num_own, num_passes=num_passes)
    running = {one.micro_batch for one in passes}
    return BatchPlan(
        cut=own.cut,
        units=own.units,
        passes=passes,
        left_out=tuple(index for index in range(num_own) if index not in running),
        num_left_out=max(map(_num_left_out, told, [any(one.num_counted for one in told)] * len(told))),
        denominator=denominator,
        total=total,
        reduction=own.reduction,
        num_by_rank=num_by_rank,
        rank=ranks.rank,
        is_proven=all(one.is_proven for one in told),
        terms=TermUnits(
            each=own.terms, totals=[sum(each) for each in zip(*(one.terms for one in told), strict=True)], rows=total
        ),
    )


def _num_left_out(one: _Told, has_counted: bool) -> int:
    """How many micro-batches of its own a rank does not run; where none of any rank counts, it runs its last."""
    return int(one.num_own - (one.num_counted if has_counted else min(one.num_own, 1)))


def _ask_all(
    ranks: Ranks, own: OwnRows, error: Exception | None, layout: Layout, proven_size: int, num_terms: int
) -> list[_Told]:
    """Gather what every rank tells of its rows; an error where one failed."""
    counted = own.counted(layout)
    facts = _told(own, counted, is_proven=_is_proven(own, counted, proven_size))
    numbers = [float(error is not None), facts.num_own, facts.num_counted, facts.total, facts.largest, facts.is_proven]
    numbers += (
        facts.terms or [0.0] * num_terms
    )  # a rank with no row has none, and the collective carries as many of each
    told = [_heard(every) for every in ranks.gather([float(number) for number in numbers])]
    if error is not None:
        raise error
    failed = [rank for rank, one in enumerate(told) if one.has_failed]
    if failed:
        raise ParallelError(
            f"rank {failed[0]} failed before its first forward (its own error says why); no rank ran this batch."
        )
    return told


def _heard(numbers: list[float]) -> _Told:
    has_failed, num_own, num_counted, total, largest, is_proven, *terms = numbers
    return _Told(has_failed, num_own, num_counted, total, largest, is_proven, terms)


def _is_proven(own: OwnRows, counted: list[int], proven_size: int) -> bool:
    """True where the last pass is no larger than one before it, in this batch or an earlier one."""
    if own.cut is None or not counted:
        return False
    *earlier, last = [size_of(own.cut[index]) for index in counted]
    return last <= max([proven_size, *earlier])


def _with_borrowed(ranks: Ranks, own: OwnRows, told: list[_Told], layout: Layout) -> OwnRows:
    """This rank's rows, and a micro-batch of the rank that has the most, where this one has nothing that counts."""
    counted = [int(one.num_counted) for one in told]
    lenders = counted if any(counted) else [int(one.num_own) for one in told]
    if all(lenders):
        return own

    def lend() -> Any:
        assert own.cut is not None
        return move(own.cut[(own.counted(layout) or [len(own.cut) - 1])[-1]], torch.device("cpu"))

    lent = ranks.lend(lend, lenders.index(max(lenders)))
    if lenders[ranks.rank]:
        return own
    terms = (*own.terms, (0.0,) * len(told[0].terms)) if told[0].terms else ()
    return OwnRows(cut=_joined(own.cut, lent), units=(*own.units, 0.0), reduction=own.reduction, terms=terms)


def _joined(own: MicroBatches | None, lent: Batch) -> MicroBatches:
    """The micro-batches of this rank and a borrowed one, none of whose rows is this rank's."""
    rows, lengths = ((), ()) if own is None else (own.row_numbers, own.cut.lengths if own.cut else (0,) * len(own))
    held = () if own is None else own.micro_batches
    return MicroBatches((*held, lent), Cut(rows=(*rows, ()), lengths=(*lengths, 0)))
