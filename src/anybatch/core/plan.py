"""`BatchPlan`: everything about a batch that is decided before its first forward."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from anybatch.core.micro_batches import MicroBatches
from anybatch.core.objective import TermPlace
from anybatch.core.option_types import Reduction


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
