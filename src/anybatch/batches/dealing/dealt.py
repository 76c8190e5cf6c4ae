"""Dealing the rows of one batch to ranks: every row to exactly one of them."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace

from torch import Tensor

from anybatch.batches.cost import Cost
from anybatch.batches.nesting import Batch, map_tensors
from anybatch.errors import BatchError
from anybatch.faces import one_line


@dataclass(frozen=True, slots=True)
class Dealt:
    """One rank's part of a batch that several ranks share.

    `Accumulator` and `Update` take one as they take a batch. A rank that was dealt no row has `row_numbers == ()` and a
    `batch` of one stand-in row, the first of the whole batch: it takes part in forward, backward and every synchronisation,
    and counts for nothing.
    """

    batch: Batch
    """This rank's rows, collated; or the stand-in."""
    row_numbers: tuple[int, ...]
    """Which rows of the whole batch these are, in the order of `batch`."""
    num_rows: int
    """Rows of the whole batch, over all ranks."""

    __repr__ = one_line

    @property
    def is_stand_in(self) -> bool:
        """True where this rank was dealt no row."""
        return not self.row_numbers

    def pin_memory(self) -> "Dealt":
        """With every tensor in pinned memory; what a loader with `pin_memory=True` calls."""
        return replace(self, batch=map_tensors(self.batch, Tensor.pin_memory))


def deal_rows(count: int, ranks: int) -> list[tuple[int, ...]]:
    """Row numbers for each rank: consecutive, near-equal in number, longer parts first.

    >>> [len(rows) for rows in deal_rows(40, 3)], deal_rows(2, 3)
    ([14, 13, 13], [(0,), (1,), ()])
    """
    shortest, num_longer = divmod(count, ranks)
    starts = [rank * shortest + min(rank, num_longer) for rank in range(ranks + 1)]
    return [tuple(range(start, stop)) for start, stop in itertools.pairwise(starts)]


def deal_by_cost(lengths: Sequence[int], ranks: int, cost: Cost) -> list[tuple[int, ...]]:
    """Row numbers for each rank, ascending, so that all ranks have rows of about the same cost.

    Rows are dealt longest first, each to the rank whose rows cost least so far. The sum of `cost.of_row` becomes equal. The
    padding and the fixed cost of a rank's own cut do not: trading rows until they were equal too gained 0 to 5 %, so it is left
    out.

    >>> deal_by_cost([9, 1, 1, 2, 5, 1], 2, Cost())
    [(0,), (1, 2, 3, 4, 5)]
    """
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    heapify(loads)
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if lengths[row] < 1:
            raise BatchError(
                f"row {row} is {lengths[row]} tokens long; expected 1 or more. Drop the row, or mend lengths=."
            )
        load, rank = loads[0]
        parts[rank].append(row)
        heapreplace(loads, (load + cost.of_row(lengths[row]), rank))
    return [tuple(sorted(part)) for part in parts]
