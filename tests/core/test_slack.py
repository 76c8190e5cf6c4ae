"""`Tokens(slack=...)`: up to this share of the least cost is given up where that halves the largest micro-batch."""

import random

import pytest
import torch

from anybatch import Cost, MicroBatches, Tokens


def padded(lengths: list[int]) -> dict[str, torch.Tensor]:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": mask * 7, "attention_mask": mask}


def shapes(cut: MicroBatches) -> list[tuple[int, int]]:
    return [tuple(part["input_ids"].shape) for part in cut]


def largest(cut: MicroBatches) -> int:
    return max(rows * length for rows, length in shapes(cut))


def cost_of(cut: MicroBatches, cost: Cost) -> float:
    return sum(cost.of(rows, length) for rows, length in shapes(cut))


ALIKE = padded([100] * 64)
"""6,400 tokens. In k micro-batches they cost (k - 1) * fixed more than in one."""
FLAT = Cost(fixed=64.0, per_token=1.0, per_square=0.0)
"""Two micro-batches cost 0.99 % more than one, four 2.97 %, eight 6.93 %."""


@pytest.mark.parametrize("budget", [6400, 12800, 100_000])
@pytest.mark.parametrize(
    ("slack", "micro_batches"),
    [(0.0, 1), (0.0098, 1), (0.01, 2), (0.015, 2), (0.029, 2), (0.03, 4), (0.069, 4), (0.07, 8)],
)
def test_the_largest_micro_batch_is_halved_as_long_as_all_costs_at_most_the_slack_more_than_the_cheapest(
    budget, slack, micro_batches
):
    cut = Tokens(budget, cost=FLAT, slack=slack).cut(ALIKE)
    assert shapes(cut) == [(64 // micro_batches, 100)] * micro_batches


def test_a_cut_that_costs_just_the_slack_more_is_taken():
    cost = Cost(fixed=1.0, per_token=0.75, per_square=0.0)  # one micro-batch costs 4, two cost 5
    assert len(Tokens(4, cost=cost, slack=0.25).cut(padded([1] * 4))) == 2
    assert len(Tokens(4, cost=cost, slack=0.2499).cut(padded([1] * 4))) == 1


def test_two_percent_are_given_up_unless_told_otherwise():
    for share, micro_batches in ((0.0195, 2), (0.0205, 1)):
        cost = Cost(fixed=6400 * share / (1 - share), per_token=1.0, per_square=0.0)
        assert cost.fixed / (cost.fixed + 6400) == pytest.approx(share)
        assert len(Tokens(6400, cost=cost).cut(ALIKE)) == micro_batches


def test_no_micro_batch_is_made_too_small_for_the_longest_row():
    cut = Tokens(300, cost=Cost(fixed=1e-9), slack=0.9).cut(padded([100, 1, 1, 1]))
    assert max(length for _, length in shapes(cut)) == 100
    assert largest(cut) == 100


@pytest.mark.parametrize("seed", range(12))
def test_ragged_rows_are_halved_by_the_same_rule(seed):
    """The slow twin: the cheapest cut under half of the largest micro-batch, again and again, while it costs little more."""
    rng = random.Random(seed)
    lengths = [max(1, min(200, round(rng.lognormvariate(3, 1)))) for _ in range(rng.randrange(3, 60))]
    batch, cost, slack = padded(lengths), Cost(fixed=rng.choice([1.0, 20.0, 100.0])), rng.choice([0.01, 0.05, 0.3])
    budget = max(lengths) * rng.randrange(1, 40)
    wanted = cheapest = Tokens(budget, cost=cost, slack=0.0).cut(batch)
    halvings = 0
    while (half := max(largest(wanted) // 2, max(lengths))) < largest(wanted):
        smaller = Tokens(half, cost=cost, slack=0.0).cut(batch)
        if cost_of(smaller, cost) > (1 + slack) * cost_of(cheapest, cost):
            break
        wanted = smaller
        halvings += 1
    cut = Tokens(budget, cost=cost, slack=slack).cut(batch)
    assert cut.row_numbers == wanted.row_numbers
    assert cost_of(cut, cost) <= (1 + slack) * cost_of(cheapest, cost)
    assert largest(cut) <= largest(cheapest) / 2**halvings or halvings == 0 or largest(cut) <= 2 * max(lengths)
