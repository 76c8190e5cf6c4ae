"""Dealing the rows of one batch to ranks: every row to exactly one of them."""

import itertools
from collections.abc import Sequence
from heapq import heapify, heapreplace

from anybatch.errors import BatchError
from anybatch.ragged import Cost


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
