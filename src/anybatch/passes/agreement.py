"""What ranks tell each other of a batch before its first forward: denominator first, over all of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from anybatch.batches import Batch, Cut, MicroBatches, move, tensors
from anybatch.errors import BatchError, ParallelError
from anybatch.gradients import Shares, shares_of
from anybatch.parallel import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The same on every rank."""

    micro_batches: tuple[int, ...]
    """How many micro-batches of its own each rank has; 0 for a rank with no row."""
    num_passes: int
    """How many passes every rank runs at least; 0 where each may run as many as it has."""
    is_proven: bool
    """True where each rank's last pass is known to fit, from one that was no smaller."""

    def number(self, rank: int, index: int) -> int:
        """The number of a rank's micro-batch among those of all ranks."""
        return sum(self.micro_batches[:rank]) + index


def has_rows(batch: Batch) -> bool:
    """False of None, and of a batch all of whose tensors have 0 rows: what a rank is given when there are too few for all."""
    counts = [len(tensor) for tensor in tensors(batch) if tensor.dim() > 0] if batch is not None else [0]
    return not counts or any(counts)


def size_of(micro_batch: Batch) -> int:
    """The numbers in its tensors: of two micro-batches of one batch, the one that needs more memory has more."""
    return sum(tensor.numel() for tensor in tensors(micro_batch))


def agree(
    ranks: Ranks,
    count: Callable[[], tuple[MicroBatches | None, Shares]],
    *,
    is_even: bool,
    is_proven: Callable[[MicroBatches, Shares], bool],
    underflows: bool,
    reduction: str,
    runs_all: bool,
) -> tuple[MicroBatches, Shares, Agreed]:
    """Cut and count on every rank, then sum the units in one small collective.

    `count` gives this rank's micro-batches and shares, or None for no rows. An error in it is raised on every rank. With
    `runs_all`, micro-batches of 0 units count too. A rank with nothing that counts borrows a micro-batch, to run it with
    share 0: it has to take part in what all ranks do.
    """
    error: Exception | None = None
    cut: MicroBatches | None = None
    shares = shares_of((), reduction)
    try:
        cut, shares = count()
    except Exception as raised:
        error = raised
    num_own = 0 if cut is None else len(cut)
    num_counted = num_own if runs_all else 0 if reduction == "mean" and shares.total == 0 else len(shares.running)
    is_proven_here = cut is not None and num_counted > 0 and is_proven(cut, shares)
    facts = [error is not None, num_own, num_counted, shares.total, max(shares.units, default=0), is_proven_here]
    told = ranks.gather([float(fact) for fact in facts])
    failed = [rank for rank, numbers in enumerate(told) if numbers[0]]
    if error is not None:
        raise error
    if failed:
        raise ParallelError(
            f"rank {failed[0]} failed before its first forward (its own error says why); no rank ran this batch."
        )
    total, largest = sum(numbers[3] for numbers in told), max(numbers[4] for numbers in told)
    micro_batches = tuple(int(numbers[1]) for numbers in told)
    passes = [int(numbers[2]) for numbers in told]
    shares = replace(shares, denominator=largest if underflows else total, total=total)
    agreed = Agreed(
        micro_batches=micro_batches,
        num_passes=max(*passes, 1) if is_even else 0,
        is_proven=all(numbers[5] for numbers in told),
    )
    if not any(micro_batches):
        raise BatchError(f"this batch has no rows on any of its {ranks.size} ranks. Give at least one row, or skip it.")
    lenders = passes if any(passes) else list(micro_batches)
    if all(lenders):
        assert cut is not None
        return cut, shares, agreed
    lent = _lend(ranks, cut, shares, lenders)
    if lenders[ranks.rank]:
        assert cut is not None
        return cut, shares, agreed
    return _joined(cut, lent), replace(shares, units=(*shares.units, 0.0), is_borrowed=True), agreed


def _lend(ranks: Ranks, cut: MicroBatches | None, shares: Shares, lenders: list[int]) -> Batch:
    """One micro-batch of the rank that has the most, on every rank."""

    def make() -> Any:
        assert cut is not None
        return move(cut[shares.running[-1]], torch.device("cpu"))

    return ranks.lend(make, lenders.index(max(lenders)))


def _joined(own: MicroBatches | None, lent: Batch) -> MicroBatches:
    """The micro-batches of this rank and a borrowed one, none of whose rows is this rank's."""
    rows, lengths = ((), ()) if own is None else (own.row_numbers, own.cut.lengths if own.cut else (0,) * len(own))
    held = () if own is None else own.micro_batches
    return MicroBatches((*held, lent), Cut(rows=(*rows, ()), lengths=(*lengths, 0)))
