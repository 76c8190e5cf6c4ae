"""The estimate against every row's own gradient: without bias, with an interval that holds; and formulas that are not."""

import math

import pytest
import torch
from torch import Tensor

from anybatch.noise import NoiseScale, WindowNoise, fieller, noise_scale_of
from tests.noise.problems import PROBLEMS, Problem

CUTS = {"equal": [6] * 6, "a short tail": [8, 8, 8, 2], "all unequal": [16, 4, 4, 4, 3, 1], "single rows": [1] * 24}


def drawn(problem: Problem, rows: int, count: int) -> Tensor:
    """So many windows, each of rows drawn at random."""
    return torch.randint(0, problem.num_rows, (count, rows), generator=torch.Generator().manual_seed(5))


def sums(problem: Problem, chosen: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """|S|^2, sum |S_k|^2, U and U_k of windows whose rows are cut in the order they stand."""
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    is_same = (owner[:, None] == owner[None]).double()
    parts = []
    for some in chosen.split(2000):
        grams = problem.grams[some[:, :, None], some[:, None, :]]
        parts.append(torch.stack([grams.sum((1, 2)), (grams * is_same).sum((1, 2))]))
    whole, squares = torch.cat(parts, dim=1)
    each = torch.stack([problem.units[chosen[:, owner == part]].sum(1) for part in range(len(sizes))], dim=1)
    return whole, squares, each.sum(1), each


def windows(problem: Problem, chosen: Tensor, sizes: list[int]) -> list[WindowNoise]:
    whole, squares, units, each = sums(problem, chosen, sizes)
    numbers = ((whole.sqrt() / units), squares / units**2, (each**2).sum(1) / units**2)
    return [WindowNoise.of(*window, rows=sum(sizes)) for window in zip(*(one.tolist() for one in numbers), strict=True)]


def estimates(found: list[WindowNoise], each: int = 20) -> list[NoiseScale]:
    return [noise_scale_of(found[start : start + each]) for start in range(0, len(found), each)]


def share_held(problem: Problem, found: list[WindowNoise]) -> float:
    held = [one.low <= problem.noise_scale <= one.high for one in estimates(found)]
    return sum(held) / len(held)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_it_is_without_bias_and_its_interval_holds_whatever_the_cut(name, cut):
    problem, sizes = PROBLEMS[name](), CUTS[cut]
    found = windows(problem, drawn(problem, sum(sizes), 10_000), sizes)
    scale = noise_scale_of(found)
    sampling = (scale.high - scale.low) / 2 / 1.645
    assert abs(scale.rows - problem.noise_scale) < 0.01 * problem.noise_scale + 2.5 * sampling
    assert sampling < 0.025 * problem.noise_scale
    assert 0.85 <= share_held(problem, found) <= 0.93


@pytest.mark.parametrize("name", ["linear", "digits"])
def test_the_formula_for_equal_sizes_is_wrong_with_one_short_micro_batch(name):
    problem, sizes = PROBLEMS[name](), [8, 8, 8, 1]
    rows = drawn(problem, sum(sizes), 4000)
    whole, _, units, _ = sums(problem, rows, sizes)
    big, small = float(sum(sizes)), sum(sizes) / len(sizes)
    norms = (whole / units**2).mean()
    # the mean of |g_k|^2 of the micro-batches' mean gradients, as if all were of the mean size
    owners = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    of_parts = [
        problem.grams[rows[:, owners == part][:, :, None], rows[:, owners == part][:, None]].sum((1, 2)) / size**2
        for part, size in enumerate(sizes)
    ]
    parts = torch.stack(of_parts).mean()
    signal = (big * norms - small * parts) / (big - small)
    noise = (parts - norms) / (1 / small - 1 / big)
    wrong = float(noise / signal)
    assert wrong < 0 or wrong > 1.5 * problem.noise_scale
    right = noise_scale_of(windows(problem, rows, sizes)).rows
    assert right == pytest.approx(problem.noise_scale, rel=0.08)


def test_rows_sorted_by_length_are_strata_and_the_interval_never_holds():
    problem, sizes = PROBLEMS["text"](), CUTS["equal"]
    chosen = drawn(problem, sum(sizes), 4000)
    by_length = chosen.gather(1, problem.units[chosen].argsort(dim=1, stable=True))
    found = windows(problem, by_length, sizes)
    assert not problem.noise_scale * 0.9 < noise_scale_of(found).rows < problem.noise_scale * 1.1
    assert share_held(problem, found) < 0.75


def test_the_interval_is_where_a_t_test_of_the_difference_does_not_tell_it_from_0():
    torch.manual_seed(3)
    below = (torch.randn(12) + 3).double()
    above = (below * 0.5 + torch.randn(12) + 8).double()
    low, high = fieller(above.tolist(), below.tolist())

    def is_inside(ratio: float) -> bool:
        rest = above - ratio * below
        return float(rest.mean().abs() / (rest.std() / 12**0.5)) < 1.7959  # Student's t, 95 %, 11 degrees of freedom

    assert [is_inside(low * 0.999), is_inside(low * 1.001)] == [False, True]
    assert [is_inside(high * 0.999), is_inside(high * 1.001)] == [True, False]


def test_it_is_open_above_where_the_signal_is_not_told_from_0():
    lost = noise_scale_of([WindowNoise(10.0 + step % 3, (-1.0) ** step) for step in range(9)])
    assert lost.high == math.inf
    assert 0 < lost.low < lost.rows
    none = noise_scale_of([WindowNoise(10.0 + step % 3, -1.0 + 0.1 * (step % 2)) for step in range(9)])
    assert (none.rows, none.high) == (math.inf, math.inf)
