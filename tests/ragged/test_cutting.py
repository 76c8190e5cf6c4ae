"""The cheapest cut: against every cut there is."""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from anybatch import Cost, SplitError
from anybatch.ragged.cheapest_cut import best_cut

COSTS = st.builds(
    Cost,
    fixed=st.sampled_from([0.0, 1.0, 7.0, 29.0, 400.0]),
    per_token=st.sampled_from([0.5, 1.0, 3.0]),
    per_square=st.sampled_from([0.0, 0.0007, 0.1]),
)


def cheapest_contiguous(lengths: Sequence[int], budget: int, cost: Cost) -> float:
    """The slow, readable twin: every place where the last micro-batch of the j shortest rows may begin."""
    ascending, best = sorted(lengths), [0.0]
    for stop in range(1, len(lengths) + 1):
        longest = ascending[stop - 1]
        fitting = [start for start in range(stop) if (stop - start) * longest <= budget]
        best.append(min(best[start] + cost.of(stop - start, longest) for start in fitting))
    return best[-1]


def partitions(rows: list[int]) -> Iterator[list[list[int]]]:
    """Every way to put rows into micro-batches."""
    if not rows:
        yield []
        return
    first, rest = rows[0], rows[1:]
    for parts in partitions(rest):
        yield [[first], *parts]
        for index, part in enumerate(parts):
            yield [*parts[:index], [first, *part], *parts[index + 1 :]]


def cheapest_partition(lengths: Sequence[int], budget: int, cost: Cost) -> float:
    fitting = (
        parts
        for parts in partitions(list(range(len(lengths))))
        if all(len(part) * max(lengths[row] for row in part) <= budget for part in parts)
    )
    return min(sum(cost.of(len(part), max(lengths[row] for row in part)) for part in parts) for parts in fitting)


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=50), spare=st.integers(0, 200), cost=COSTS)
# the lower hull of the candidates gives up one here that is the best once its left neighbour no longer fits
@example(lengths=[1, 3, 4, 4, 5, 5], spare=5, cost=Cost(fixed=1.0, per_token=1.0, per_square=0.0))
def test_no_contiguous_cut_of_the_sorted_rows_is_cheaper(lengths, spare, cost):
    budget = max(lengths) + spare
    cut = best_cut(lengths, budget, cost)
    assert cut.cost(cost) == pytest.approx(cheapest_contiguous(lengths, budget, cost), rel=1e-9)
    assert all(len(rows) * length <= budget for rows, length in zip(cut.rows, cut.lengths, strict=True))
    assert [max(lengths[row] for row in rows) for rows in cut.rows] == list(cut.lengths)
    assert sorted(row for rows in cut.rows for row in rows) == list(range(len(lengths)))
    assert list(cut.lengths) == sorted(cut.lengths, reverse=True)


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=7), spare=st.integers(0, 90), cost=COSTS)
def test_no_cut_at_all_is_cheaper(lengths, spare, cost):
    budget = max(lengths) + spare
    assert best_cut(lengths, budget, cost).cost(cost) == pytest.approx(
        cheapest_partition(lengths, budget, cost), rel=1e-9
    )


def test_eight_rows_against_all_4140_ways_to_cut_them():
    lengths, cost = [3, 90, 14, 15, 92, 65, 35, 8], Cost(fixed=20.0)
    assert best_cut(lengths, 180, cost).cost(cost) == pytest.approx(cheapest_partition(lengths, 180, cost))


def test_filling_up_the_sorted_rows_to_the_budget_is_dearer():
    lengths, budget, cost = [2] * 9 + [50], 100, Cost()
    filled = cost.of(1, 2) * 8 + cost.of(2, 50)
    assert best_cut(lengths, budget, cost).cost(cost) == cost.of(9, 2) + cost.of(1, 50)
    assert best_cut(lengths, budget, cost).cost(cost) < 0.5 * filled


def test_a_large_fixed_cost_makes_few_micro_batches_and_none_makes_one_per_length():
    lengths = [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(best_cut(lengths, 64, Cost(fixed=1e6)).rows) == 1
    assert len(best_cut(lengths, 64, Cost(fixed=0.0)).rows) == 8


def test_rows_of_one_length_keep_their_order_and_fill_the_budget():
    cut = best_cut([10] * 8, 40, Cost())
    assert cut.rows == ((4, 5, 6, 7), (0, 1, 2, 3))
    assert cut.padded_tokens == 80


def test_a_row_longer_than_the_budget_is_refused_with_the_row_the_length_and_the_fix():
    message = (
        r"row 1 is 9 tokens long; Tokens\(budget=8\) must hold the longest row.*Use Tokens\(9\) or more, or truncate"
    )
    with pytest.raises(SplitError, match=message):
        best_cut([4, 9, 3], 8, Cost())


def test_a_row_without_tokens_is_refused():
    with pytest.raises(SplitError, match=r"row 2 is 0 tokens long; expected 1 or more"):
        best_cut([4, 9, 0], 16, Cost())


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=50), spare=st.integers(0, 900), cost=COSTS)
def test_a_small_cut_costs_at_most_its_slack_more_and_is_never_larger(lengths, spare, cost):
    budget = max(lengths) + spare
    best, small = best_cut(lengths, budget, cost), best_cut(lengths, budget, cost, slack=0.01)
    assert small.cost(cost) <= 1.01 * best.cost(cost)
    assert small.largest <= best.largest
    assert best_cut(lengths, budget, cost, slack=0.0) == best


def test_one_percent_of_the_cost_may_halve_the_largest_micro_batch():
    lengths, cost = [100] * 64 + [3] * 64, Cost(fixed=10.0)
    best, small = best_cut(lengths, 6400, cost), best_cut(lengths, 6400, cost, slack=0.01)
    assert small.largest <= best.largest / 4
    assert small.cost(cost) <= 1.01 * best.cost(cost)
