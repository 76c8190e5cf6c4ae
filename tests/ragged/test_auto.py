"""Auto and its search: decided by a made-up clock, so that the same times give the same choice."""

import math
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from anybatch import Accumulator, Auto, Cost, Fit, Rows, SplitError, Tokens, supervised
from anybatch.core.batch import num_rows
from anybatch.core.splits import near_equal
from anybatch.ragged.tuning import LIMIT, Search, sizes_between
from tests.reference import relative_error, whole_batch_gradient

Clock = Callable[[int], float]
"""Seconds of a micro-batch of this many rows."""


def linear(fixed: float) -> Clock:
    return lambda rows: fixed + rows


def bowl(fixed: float, bend: float) -> Clock:
    return lambda rows: fixed + rows + bend * rows**2


def cache(fixed: float, holds: float, slower: float) -> Clock:
    return lambda rows: fixed + rows * (1 + slower / (1 + (holds / rows) ** 4))


CLOCKS = st.one_of(
    st.builds(linear, st.floats(0.01, 100)),
    st.builds(bowl, st.floats(0.01, 100), st.floats(1e-4, 0.1)),
    st.builds(cache, st.floats(0.01, 100), st.floats(2, 500), st.floats(0.1, 1)),
)


def tune(auto: Auto, batch: Tensor, clock: Clock, *, updates: int = LIMIT, noise: float = 0.0) -> None:
    chance = random.Random(0)
    for _ in range(updates):
        cut = auto.cut(batch)
        auto.learn(cut, [clock(num_rows(part)) * chance.lognormvariate(0, noise) for part in cut])


@given(clock=CLOCKS, count=st.sampled_from([1, 8, 64, 100, 500, 1024]), most=st.sampled_from([1, 7, 64, 4096]))
def test_twelve_updates_end_within_3_percent_of_the_best_size_there_is(clock, count, most):
    auto = Auto(most=most)
    tune(auto, torch.zeros(count, 1), clock)
    choice = auto.choice
    assert choice is not None
    assert choice.is_settled
    assert choice.num_updates <= LIMIT
    assert choice.size <= most

    def total(size: int) -> float:
        return sum(map(clock, near_equal(count, size)))

    assert total(choice.size) <= 1.03 * min(map(total, range(1, min(count, most) + 1)))


def test_the_first_size_tried_is_not_good_enough():
    clock = linear(10.0)
    assert sum(map(clock, near_equal(64, 1))) > 1.03 * min(
        sum(map(clock, near_equal(64, size))) for size in range(1, 65)
    )


def test_noise_of_one_percent_and_a_slow_first_update_are_borne():
    clock, auto, batch = bowl(10.0, 0.01), Auto(most=512), torch.zeros(512, 1)
    cut = auto.cut(batch)
    auto.learn(cut, [5 * clock(num_rows(part)) for part in cut])
    tune(auto, batch, clock, updates=LIMIT - 1, noise=0.01)
    assert auto.choice is not None
    best = min(sum(map(clock, near_equal(512, size))) for size in range(1, 513))
    assert sum(map(clock, near_equal(512, auto.choice.size))) <= 1.03 * best


def test_once_settled_the_best_size_is_used_and_nothing_is_tried_again():
    auto, batch = Auto(most=32), torch.zeros(64, 1)
    tune(auto, batch, linear(5.0))
    assert auto.choice is not None
    assert (auto.choice.kind, auto.choice.size) == ("rows", 32)
    tune(auto, batch, lambda rows: rows**3, updates=5)
    assert auto.choice.size == 32
    assert [num_rows(part) for part in auto.cut(batch)] == [32, 32]


def test_rows_of_another_shape_are_looked_at_again_and_the_old_choice_is_remembered():
    auto, small, large = Auto(most=64), torch.zeros(64, 4), torch.zeros(64, 64)
    tune(auto, small, linear(100.0))
    assert auto.choice is not None
    assert auto.choice.size == 64
    auto.cut(large)
    assert auto.choice is not None
    assert not auto.choice.is_settled
    tune(auto, large, lambda rows: 0.01 + rows**2)
    assert auto.choice is not None
    assert auto.choice.size == 1
    auto.cut(small)
    assert auto.choice is not None
    assert auto.choice.size == 64


def test_the_choice_says_what_was_tried_and_why():
    auto = Auto(most=16)
    assert auto.choice is None
    tune(auto, torch.zeros(16, 1), linear(1.0))
    assert auto.choice is not None
    text = auto.choice.describe()
    assert text.startswith("16 rows per micro-batch, chosen after")
    assert "1: 53%" in text
    assert "16: 100%" in text
    assert len(auto.choice.trials) > 3


def ragged(seed: int, rows: int = 96) -> dict[str, Tensor]:
    chance = random.Random(seed)
    lengths = torch.tensor([min(200, max(2, int(chance.lognormvariate(3.5, 0.8)))) for _ in range(rows)])
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    return {"input_ids": mask, "attention_mask": mask}


def seconds_of(cost: Cost, slower_above: int, rows: int, length: int) -> float:
    """The cost model, and beside it what no model knows: large micro-batches fall out of the cache."""
    slower = 1 + 0.8 / (1 + (slower_above / (rows * length)) ** 6)
    return cost.fixed + slower * rows * cost.of_row(length)


@pytest.mark.parametrize("slower_above", [400, 1500, 10**9])
def test_token_budgets_are_tuned_too(slower_above):
    true, auto = Cost(fixed=3e-2, per_token=1e-4, per_square=1e-8), Auto(most=Tokens(8192))
    for seed in range(LIMIT):
        cut = auto.cut(ragged(seed))
        auto.learn(cut, [seconds_of(true, slower_above, *part["input_ids"].shape) for part in cut])
    choice = auto.choice
    assert choice is not None
    assert choice.kind == "tokens"
    assert choice.is_settled

    def total(budget: int) -> float:
        shapes = (part["input_ids"].shape for part in Tokens(budget, cost=auto.most.cost).cut(batch))
        return sum(seconds_of(true, slower_above, *shape) for shape in shapes)

    batch = ragged(99)
    longest = int(batch["attention_mask"].sum(1).max())
    best = min(map(total, range(longest, 8193, 50)))
    assert total(max(choice.size, longest)) <= 1.03 * best


def test_tokens_are_taken_for_a_masked_batch_and_rows_for_any_other():
    auto = Auto()
    auto.cut(torch.zeros(10, 2))
    assert auto.choice is not None
    assert auto.choice.kind == "rows"
    auto.cut(ragged(0))
    assert auto.choice is not None
    assert auto.choice.kind == "tokens"
    auto.cut(torch.zeros(10, 2))
    assert auto.choice.kind == "rows"


def test_a_row_longer_than_the_upper_bound_is_refused():
    with pytest.raises(SplitError, match=r"tokens long; Tokens\(budget=20\) must hold the longest row"):
        Auto(most=Tokens(20)).cut(ragged(0))


@pytest.mark.parametrize("most", ["64", 2.5, [64]])
def test_an_upper_bound_that_is_none_is_refused_with_the_value(most):
    with pytest.raises(SplitError, match=r"Auto\(most=.*\): give the largest micro-batch allowed"):
        Auto(most=most)


def test_a_ladder_ends_at_its_largest_size():
    assert sizes_between(1, 1) == [1]
    assert sizes_between(3, 100)[-1] == 100
    assert Auto(most=Rows(8)).most == Rows(8)


def test_a_search_with_one_size_measures_it_once():
    search = Search([5])
    search.tell(1.0)
    assert search.is_done
    assert search.best == 5


def test_real_updates_are_tuned_and_every_one_of_them_is_exact():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 5))
    criterion = nn.CrossEntropyLoss(ignore_index=0)
    batch = (torch.randn(96, 32), torch.randint(0, 5, (96,)))
    reference = whole_batch_gradient(model, lambda twin, whole: criterion(twin(whole[0]), whole[1]), batch)
    accumulator = Accumulator(model, supervised(criterion), micro_batch="auto")
    counts = set()
    for _ in range(LIMIT + 1):
        model.zero_grad()
        counts.add(accumulator.backward(batch).micro_batches)
        assert relative_error(model, reference) < 5e-7
    assert isinstance(accumulator.split, Fit)
    choice = accumulator.split.choice.fastest
    assert choice.is_settled
    assert len(counts) > 3
    assert math.isfinite(choice.trials[0].rate)


def test_a_size_that_failed_is_measured_again_once_it_is_allowed_and_what_lies_below_is_not_left_out():
    auto, batch = Auto(most=16), torch.zeros(16, 1)
    tune(auto, batch, linear(10))
    assert auto.choice.size == 16
    for bound, best in [(8, 8), (4, 4)]:
        assert auto.shrink(auto.cut(batch)) is auto
        tune(auto, batch, linear(10))
        assert (auto.bound, auto.choice.size) == (bound, best)
    assert auto.resized(16).cut(batch).micro_batches[0].shape[0] == 16
    tune(auto, batch, linear(10))
    assert auto.choice.size == 16
