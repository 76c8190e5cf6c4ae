"""`BatchPlan`: everything that is decided before the first forward of a batch, in agreement with all ranks."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

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
    """Number of the micro-batch on this rank."""
    share: float
    """Weight of its loss in the batch's loss; 0.0 if it only keeps collectives matched or feeds batch statistics."""
    reports: bool
    """False if its loss and metrics do not count on this rank."""
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Passes of one batch on this rank; one process is a group of one."""

    cut: MicroBatches
    """This rank's micro-batches; the last may be borrowed from another rank."""
    units: Sequence[float]
    """Units of each micro-batch: the number that its mean loss divides by."""
    passes: tuple[Pass, ...]
    left_out: tuple[int, ...]
    """Micro-batches of this rank that do not run, because they have no units."""
    num_left_out: int = 0
    """Largest number of them on any rank; used with several ranks only."""
    denominator: float
    """Shares are `units / denominator`."""
    total: float
    """Units of the whole batch, over all ranks."""
    reduction: Reduction
    num_by_rank: tuple[int, ...]
    """Number of micro-batches of each rank's own rows; 0 for a rank without rows."""
    rank: int = 0
    last_pass_fits: bool = True
    """True if the last pass of every rank is no larger than one that did fit."""
    terms: "TermUnits" = field(default_factory=lambda: TermUnits())

    @property
    def is_empty(self) -> bool:
        """True for a mean over 0 units on all ranks: its gradient is zero."""
        return self.reduction == "mean" and self.total == 0

    @property
    def num_own(self) -> int:
        return self.num_by_rank[self.rank]

    @property
    def num_micro_batches(self) -> int:
        return sum(self.num_by_rank)

    @property
    def micro_batches(self) -> list[int]:
        """Numbers of the micro-batches that run, each once, in order."""
        return list(dict.fromkeys(one.micro_batch for one in self.passes))

    @property
    def units_seen(self) -> float:
        """Units of all rows that a coupled loss sees, without dropped ones (one process only)."""
        return self.total if len(self.num_by_rank) > 1 else sum(self.units[index] for index in self.micro_batches)

    def number(self, rank: int, micro_batch: int) -> int:
        """Return the number of a rank's micro-batch among those of all ranks."""
        return sum(self.num_by_rank[:rank]) + micro_batch

    def weights(self, factor: float) -> list[float]:
        """Return the factor of each pass's loss: its share times `factor`."""
        if self.reduction == "sum":
            return [factor if one.share else 0.0 for one in self.passes]
        denominator = self.denominator or 1.0
        return [factor * self.units[one.micro_batch] / denominator if one.share else 0.0 for one in self.passes]

    def place(self, micro_batch: int) -> TermPlace:
        """Return the units of a micro-batch and of its batch."""
        units = self.units[micro_batch]
        if not self.terms.each:
            return TermPlace(units=units, total=self.total)
        return TermPlace(
            units=units, total=self.terms.rows, terms=self.terms.each[micro_batch], totals=self.terms.totals
        )

    def left_over(self, counted: float) -> float:
        """Return the final factor of the summed gradient, if only `counted` units of all ranks went into it."""
        return 1.0 if self.reduction == "sum" or counted == 0 else self.denominator / counted

    def without(self, micro_batches: Collection[int]) -> "BatchPlan":
        """Return the plan without the passes of these micro-batches; without any pass if no share is left."""
        left = [one for one in self.passes if one.micro_batch not in micro_batches]
        if not any(one.share for one in left):
            left = []
        passes = tuple(replace(one, is_last=one is left[-1]) for one in left)
        return replace(self, passes=passes, terms=self.terms.without(micro_batches, self.units))


@dataclass(frozen=True, slots=True, kw_only=True)
class TermUnits:
    """Units of each term of a loss of several means; empty for a loss of one mean."""

    each: Sequence[Sequence[float]] = ()
    """Units of each term, for each micro-batch of this rank."""
    totals: Sequence[float] = ()
    """Units of each term in the whole batch, over all ranks."""
    rows: float = 0.0
    """Rows of the whole batch that count for any term."""

    def without(self, micro_batches: Collection[int], units: Sequence[float]) -> "TermUnits":
        """Return the units without those of these micro-batches."""
        lost = [index for index in micro_batches if self.each and any(self.each[index])]
        each = [() if index in lost else one for index, one in enumerate(self.each)]
        totals = [total - sum(self.each[index][term] for index in lost) for term, total in enumerate(self.totals)]
        return replace(self, each=each, totals=totals, rows=self.rows - sum(units[index] for index in lost))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Choice and order of the micro-batches that a schedule runs."""

    runs_all: bool = False
    """True if micro-batches of 0 units run too, because other rows depend on theirs."""
    repeats_first: bool = False
    """True if passes that only keep collectives matched come first, not last."""


def lay_out(
    units: Sequence[float], reduction: Reduction, layout: Layout, *, denominator: float, num_own: int, num_passes: int
) -> tuple[Pass, ...]:
    """Return the passes of a rank, at least `num_passes`. The first `num_own` micro-batches hold its own rows.

    A mean over 0 units may be nan, so it is left out unless the layout runs all. If all have 0 units, the last one runs, for
    the zero gradients of the parameters that it uses.
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
    """Micro-batches of one rank and their units."""

    cut: MicroBatches | None = None
    """None if the rank has no rows."""
    units: Sequence[float] = ()
    reduction: Reduction = "mean"
    terms: Sequence[Sequence[float]] = ()
    """Units of each term of a loss of several means, for each micro-batch."""

    def counted(self, layout: Layout) -> list[int]:
        """Return the numbers of the micro-batches that have a share, and so run."""
        if layout.runs_all or self.reduction == "sum":
            return list(range(len(self.units)))
        return [index for index, units in enumerate(self.units) if units > 0]


def has_rows(batch: Batch) -> bool:
    """Return False for None, and for a batch of tensors with 0 rows, which a rank gets if there are too few rows."""
    counts = [len(tensor) for tensor in tensors(batch) if tensor.dim() > 0] if batch is not None else [0]
    return not counts or any(counts)


def count_rows(
    objective: Objective | Coupled, model: nn.Module, cut: MicroBatches | None, *, is_stand_in: bool
) -> OwnRows:
    """Count the units of this rank's micro-batches. A stand-in for no rows has 0 units, for a sum too."""
    reduction = objective.reduction if objective.reduction_for is None else objective.reduction_for(model)
    if cut is None:
        return OwnRows(reduction=reduction)
    if objective.units is rows and objective.units_for is None and cut.cut is not None:
        units: Sequence[float] = [len(numbers) for numbers in cut.cut.rows]  # rows may be in another dim than 0
    else:
        units = count_units(objective, model, cut.micro_batches)
    each = [count_terms(objective.terms, part) for part in cut.micro_batches] if objective.terms else []
    if is_stand_in:
        nothing = [[0.0] * len(one) for one in each]
        return OwnRows(cut=cut, units=[0] * len(units), reduction="mean", terms=nothing)
    return OwnRows(cut=cut, units=units, reduction=reduction, terms=each)


def size_of(micro_batch: Batch) -> int:
    """Count the numbers in the tensors of a micro-batch."""
    return sum(tensor.numel() for tensor in tensors(micro_batch))


def plan_batch(
    ranks: Ranks,
    own: OwnRows,
    layout: Layout,
    *,
    needs_equal_passes: bool,
    underflows: bool,
    largest_seen: int,
    num_terms: int = 0,
    error: Exception | None = None,
) -> BatchPlan:
    """Sum the units over all ranks in one small collective, and lay out this rank's passes.

    If cutting or counting raised `error` on this rank, every rank raises. With `needs_equal_passes`, each rank runs as many
    passes as the one with the most. A rank without units borrows a micro-batch and runs it with share 0, because it has to
    take part in all collectives.

    With fp16 gradients and no loss scale, the shares of a batch underflow in backward (measured: a relative error of 0.23 at
    64 micro-batches). Then (`underflows`) the largest micro-batch has share 1, and `.grad` is divided at the end.
    `largest_seen` is the size of the largest micro-batch that ran before, for `last_pass_fits`.
    """
    counts = _gather_counts(ranks, own, error, layout, largest_seen, num_terms)
    num_passes = max(int(one.num_counted) for one in counts) if needs_equal_passes else 0
    if ranks.size > 1:
        own = _with_borrowed(ranks, own, counts, layout)
    assert own.cut is not None
    total = sum(one.total for one in counts)
    denominator = max(one.largest for one in counts) if underflows else total
    num_by_rank = tuple(int(one.num_own) for one in counts)
    num_own = num_by_rank[ranks.rank]
    passes = lay_out(own.units, own.reduction, layout, denominator=denominator, num_own=num_own, num_passes=num_passes)
    running = {one.micro_batch for one in passes}
    has_counted = any(one.num_counted for one in counts)  # if no micro-batch counts, a rank runs its last
    left_out = [one.num_own - (one.num_counted if has_counted else min(one.num_own, 1)) for one in counts]
    return BatchPlan(
        cut=own.cut,
        units=own.units,
        passes=passes,
        left_out=tuple(index for index in range(num_own) if index not in running),
        num_left_out=int(max(left_out)),
        denominator=denominator,
        total=total,
        reduction=own.reduction,
        num_by_rank=num_by_rank,
        rank=ranks.rank,
        last_pass_fits=all(one.last_pass_fits for one in counts),
        terms=TermUnits(
            each=own.terms, totals=[sum(each) for each in zip(*(one.terms for one in counts), strict=True)], rows=total
        ),
    )


class _RankCounts(NamedTuple):
    """Numbers that each rank sends to the others."""

    has_failed: float
    num_own: float
    num_counted: float
    total: float
    largest: float
    last_pass_fits: float
    terms: Sequence[float] = ()
    """Units of each term of the loss, on this rank."""


def _gather_counts(
    ranks: Ranks, own: OwnRows, error: Exception | None, layout: Layout, largest_seen: int, num_terms: int
) -> list[_RankCounts]:
    """All-gather the counts of every rank; raise if one of them failed, or none has rows."""
    is_alone = ranks.size == 1
    counted = [] if is_alone else own.counted(layout)
    terms = [sum(column) for column in zip(*own.terms, strict=True)]
    num_own = 0 if own.cut is None else len(own.cut.micro_batches)
    last_pass_fits = is_alone or _last_pass_fits(own, counted, largest_seen)
    total, largest = sum(own.units), max(own.units, default=0)
    if is_alone:
        return [_RankCounts(0.0, num_own, 0, total, largest, last_pass_fits, terms)]
    # every rank sends equally many numbers, with or without rows
    numbers = [error is not None, num_own, len(counted), total, largest, last_pass_fits, *(terms or [0.0] * num_terms)]
    gathered = ranks.gather([float(number) for number in numbers])
    counts = [_RankCounts(*every[:6], every[6:]) for every in gathered]  # type: ignore[call-arg, arg-type]
    if error is not None:
        raise error
    failed = [rank for rank, one in enumerate(counts) if one.has_failed]
    if failed:
        raise ParallelError(
            f"rank {failed[0]} failed before its first forward (its own error says why); no rank ran this batch."
        )
    if not any(one.num_own for one in counts):
        raise BatchError(f"this batch has no rows on any of its {ranks.size} ranks. Give at least one row, or skip it.")
    return counts


def _last_pass_fits(own: OwnRows, counted: list[int], largest_seen: int) -> bool:
    """Return True if the last pass is no larger than an earlier one, in this batch or before."""
    if own.cut is None or not counted:
        return False
    *earlier, last = [size_of(own.cut[index]) for index in counted]
    return last <= max([largest_seen, *earlier])


def _with_borrowed(ranks: Ranks, own: OwnRows, counts: list[_RankCounts], layout: Layout) -> OwnRows:
    """Add a micro-batch of the rank that has the most, if this one has no units."""
    counted = [int(one.num_counted) for one in counts]
    lenders = counted if any(counted) else [int(one.num_own) for one in counts]
    if all(lenders):
        return own

    def lend() -> Any:
        assert own.cut is not None
        return move(own.cut[(own.counted(layout) or [len(own.cut) - 1])[-1]], torch.device("cpu"))

    lent = ranks.lend(lend, lenders.index(max(lenders)))
    if lenders[ranks.rank]:
        return own
    terms = (*own.terms, (0.0,) * len(counts[0].terms)) if counts[0].terms else ()
    borrowed = MicroBatches((lent,), Cut(rows=((),), lengths=(0,)))
    if own.cut is not None:
        lengths = own.cut.cut.lengths if own.cut.cut else (0,) * len(own.cut)
        placed = Cut(rows=(*own.cut.row_numbers, ()), lengths=(*lengths, 0))
        borrowed = MicroBatches((*own.cut.micro_batches, lent), placed)
    return OwnRows(cut=borrowed, units=(*own.units, 0.0), reduction=own.reduction, terms=terms)
