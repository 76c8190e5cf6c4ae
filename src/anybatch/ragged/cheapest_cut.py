"""The cheapest cut of rows of different lengths."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from anybatch.core import Cut
from anybatch.errors import SplitError
from anybatch.ragged.cost import Cost


def best_cut(lengths: Sequence[int], budget: int, cost: Cost, *, slack: float = 0.0) -> Cut:
    """Find the cut of least cost with at most `budget` tokens per micro-batch, padding included. O(n log n).

    Only rows that are neighbours in the order of length are put together. This loses nothing: exchanging rows between two
    micro-batches until one holds the shortest of both makes neither longer.

    With `slack`, the largest micro-batch is halved as long as the cost rises by at most this share. Near the optimum many cuts
    cost nearly the same, and some of them need far less memory.

    >>> best_cut([9, 2, 10, 2, 2], 40, Cost()).rows
    ((0, 2), (1, 3, 4))
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    ascending = [lengths[row] for row in order]
    longest = ascending[-1]
    if longest > budget:
        raise SplitError(
            f"row {order[-1]} is {longest} tokens long; Tokens(budget={budget}) must hold the longest row, because a "
            f"row is never cut. Use Tokens({longest}) or more, or truncate the row."
        )
    if ascending[0] < 1:
        raise SplitError(
            f"row {order[0]} is {ascending[0]} tokens long; expected 1 or more. Drop the row, or mend length=."
        )
    row_costs = [cost.of_row(length) for length in ascending]
    bounds, least = _bounds(ascending, row_costs, cost.fixed, budget)
    while slack > 0:
        largest = max((stop - start) * ascending[stop - 1] for start, stop in bounds)
        smaller = max(largest // 2, longest)
        if smaller == largest:
            break
        others, total = _bounds(ascending, row_costs, cost.fixed, smaller)
        if total > (1 + slack) * least:
            break
        bounds = others
    return Cut(
        rows=tuple(tuple(sorted(order[start:stop])) for start, stop in bounds),
        lengths=tuple(ascending[stop - 1] for _, stop in bounds),
    )


def _bounds(
    ascending: Sequence[int], row_costs: Sequence[float], fixed: float, budget: int
) -> tuple[list[tuple[int, int]], float]:
    """Return (start, stop) of each micro-batch in the sorted rows, the longest first, and the cost of this cut.

        best(j) = fixed + min over i of best(i) + (j - i) * row(j),   where (j - i) * length(j) <= budget

    for the j shortest rows, row(j) being the cost of one more row of length(j). As row(j) never falls, a later i that is once
    as good as an earlier one stays so, and the budget rules out earlier ones first. So candidates wait in line, each with the j
    from which it is the best: where it overtakes the one before it, or where that one no longer fits. A candidate is given up
    only if a later one overtakes it before its turn comes; the lower hull of the lines would give up more, and be wrong under
    the budget.
    """
    num_rows = len(ascending)
    earliest = [max(0, j - budget // length) for j, length in enumerate(ascending, start=1)]
    best = [0.0] * (num_rows + 1)
    starts = [0] * (num_rows + 1)
    line, turns, head = [0], [1], 0
    for j in range(1, num_rows + 1):
        while head + 1 < len(line) and turns[head + 1] <= j:
            head += 1
        i = line[head]
        starts[j] = i
        best[j] = fixed + best[i] + (j - i) * row_costs[j - 1]
        while True:
            last = line[-1]
            overtakes = bisect_left(row_costs, (best[j] - best[last]) / (j - last)) + 1
            expires = bisect_right(earliest, last) + 1
            turn = max(j + 1, min(overtakes, expires))
            if len(line) - 1 == head or turn > turns[-1]:
                break
            line.pop()
            turns.pop()
        if turn <= num_rows:
            line.append(j)
            turns.append(turn)
    bounds, stop = [], num_rows
    while stop > 0:
        bounds.append((starts[stop], stop))
        stop = starts[stop]
    return bounds, best[num_rows]
