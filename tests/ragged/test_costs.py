"""The cost of a micro-batch, learnt from noisy times."""

import random

import pytest

from anybatch import Cost, SplitError
from anybatch.ragged.cheapest_cut import best_cut
from anybatch.ragged.cost import FEWEST, LearnedCost, fit_cost

TRUE = {
    "a small transformer on a CPU": Cost(fixed=9.8e-3, per_token=337e-6, per_square=228e-9),
    "a device that is slow to start": Cost(fixed=1e-2, per_token=1e-6, per_square=1e-9),
    "nothing fixed": Cost(fixed=0.0, per_token=1e-4, per_square=0.0),
    "attention only": Cost(fixed=1e-3, per_token=0.0, per_square=1e-6),
}


def observed(cost: Cost, count: int, *, outliers: float = 0.0, seed: int = 0) -> list[tuple[int, int, float]]:
    """Times with 10 % noise; a share of `outliers` took 5 times as long."""
    chance = random.Random(seed)
    shapes = [(chance.randint(1, 16), chance.randint(4, 500)) for _ in range(count)]
    noise = [chance.lognormvariate(0, 0.1) * (5 if chance.random() < outliers else 1) for _ in shapes]
    return [(rows, length, cost.of(rows, length) * off) for (rows, length), off in zip(shapes, noise, strict=True)]


@pytest.mark.parametrize("name", TRUE)
def test_fitted_costs_predict_the_true_ones(name):
    fitted = fit_cost(observed(TRUE[name], 200), Cost())
    for rows, length, _ in observed(TRUE[name], 20, seed=1):
        assert fitted.of(rows, length) == pytest.approx(TRUE[name].of(rows, length), rel=0.1)


def test_outliers_do_not_move_the_fit():
    true = TRUE["a small transformer on a CPU"]
    fitted = fit_cost(observed(true, 200, outliers=0.2), Cost())
    for rows, length, _ in observed(true, 20, seed=1):
        assert fitted.of(rows, length) == pytest.approx(true.of(rows, length), rel=0.1)
    plain = sum(seconds / true.of(rows, length) for rows, length, seconds in observed(true, 200, outliers=0.2)) / 200
    assert plain > 1.5, "the plain mean is moved"


def test_what_the_times_leave_open_keeps_the_priors_proportions():
    prior = Cost(fixed=30.0, per_token=1.0, per_square=0.001)
    fitted = fit_cost([(8, 64, 2e-3 * prior.of(8, 64))] * 30, prior)
    assert fitted.constants == pytest.approx([2e-3 * constant for constant in prior.constants], rel=1e-6)


def test_times_of_zero_teach_nothing():
    assert fit_cost([(1, 8, 0.0)] * 30, Cost()) == Cost()


@pytest.mark.parametrize("name", TRUE)
def test_the_cut_gets_better_by_itself(name):
    true, chance, learned = TRUE[name], random.Random(2), LearnedCost(Cost())
    regrets = []
    for _ in range(6):
        lengths = [min(1024, max(2, int(chance.lognormvariate(4.5, 1)))) for _ in range(128)]
        cut = best_cut(lengths, 8192, learned.cost)
        regrets.append(cut.cost(true) / best_cut(lengths, 8192, true).cost(true) - 1)
        shapes = [(len(rows), length) for rows, length in zip(cut.rows, cut.lengths, strict=True)]
        learned.observe((*shape, true.of(*shape) * chance.lognormvariate(0, 0.1)) for shape in shapes)
    assert regrets[-1] < 0.005
    assert regrets[-1] <= max(regrets[0], 0.002)
    if name == "a device that is slow to start":
        assert regrets[0] > 1, "the defaults cut too finely for it"


def test_nothing_is_fitted_to_too_few_observations():
    learned = LearnedCost(Cost())
    few = observed(TRUE["nothing fixed"], FEWEST - 1)
    learned.observe(few)
    assert learned.cost == Cost()
    learned.observe(few[:1])
    assert learned.cost != Cost()


@pytest.mark.parametrize(
    "constants", [{"fixed": -1.0}, {"per_token": float("nan")}, {"fixed": 0, "per_token": 0, "per_square": 0}]
)
def test_costs_that_make_no_sense_are_refused(constants):
    with pytest.raises(SplitError, match=r"Cost\(fixed=.*must be finite, 0 or more, and not all 0"):
        Cost(**constants)
