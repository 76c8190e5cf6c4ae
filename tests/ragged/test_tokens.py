"""Tokens: what is trimmed, what is not, and what is said."""

import random
import warnings
from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from anybatch import Cost, MicroBatches, SplitError, Stacked, Tokens, num_rows

FINE = Cost(fixed=1.0)


def mask_of(lengths: list[int], width: int | None = None) -> Tensor:
    return (torch.arange(width or max(lengths)) < torch.tensor(lengths)[:, None]).long()


def padded(lengths: list[int], width: int | None = None) -> dict[str, Any]:
    """Tokens that say which row and column they are from, so that every mix-up shows."""
    mask = mask_of(lengths, width)
    rows, columns = mask.shape
    ids = 1000 * torch.arange(1, rows + 1)[:, None] + torch.arange(columns)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=24), spare=st.integers(0, 80), more=st.integers(0, 4))
def test_every_token_of_every_row_comes_out_once_and_padding_only_up_to_the_longest_row(lengths, spare, more):
    batch = padded(lengths, max(lengths) + more)
    cut = Tokens(max(lengths) + spare, cost=FINE).cut(batch)
    for part, rows in zip(cut, cut.row_numbers, strict=True):
        longest = max(lengths[row] for row in rows)
        for key, whole in batch.items():
            assert torch.equal(part[key], whole[list(rows), :longest])
        assert part["input_ids"].numel() <= max(lengths) + spare
    assert sorted(row for rows in cut.row_numbers for row in rows) == list(range(len(lengths)))


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=24), more=st.integers(0, 40))
def test_lengths_may_be_rounded_up_as_far_as_the_batch_is_padded(lengths, more):
    width = max(lengths) + more
    batch = padded(lengths, width)
    cut = Tokens(4 * width, cost=FINE, round_to=8).cut(batch)
    for part, rows in zip(cut, cut.row_numbers, strict=True):
        longest = max(lengths[row] for row in rows)
        rounded = min(-(-longest // 8) * 8, width)
        for key, whole in batch.items():
            assert torch.equal(part[key], whole[list(rows), :rounded])
        assert part["input_ids"].numel() <= 4 * width
    assert sorted(row for rows in cut.row_numbers for row in rows) == list(range(len(lengths)))


def test_raw_samples_are_planned_by_rounded_lengths_and_rounding_by_nothing_is_refused():
    samples = [{"input_ids": [1] * length} for length in (5, 9, 3)]
    cut = Tokens(32, collate=list, round_to=8).cut(samples)
    assert all(length % 8 == 0 for length in cut.cut.lengths)
    with pytest.raises(SplitError, match=r"round_to=0\): expected a whole number"):
        Tokens(32, round_to=0)


def test_what_has_an_entry_per_token_is_trimmed_and_nothing_else():
    lengths = [2, 6, 2, 6]
    batch = padded(lengths) | {
        "position_ids": torch.arange(6).expand(4, 6),
        "embeddings": torch.zeros(4, 6, 6),
        "square_attention_mask": torch.ones(4, 1, 6, 6),
        "image": torch.zeros(4, 3, 6, 6),
        "image_mask": torch.zeros(4, 6, 6),
        "label_of_row": torch.arange(4),
        "names": ["a", "b", "c", "d"],
        "boxes": [torch.zeros(4, 6), torch.zeros(4, 6), torch.zeros(3, 6), torch.zeros(1, 6)],
        "scale": 0.5,
        "nested": {"token_types": torch.zeros(4, 6), "features": torch.zeros(4, 6)},
    }
    per_token = ["embeddings", "token_types"]
    short = Tokens(12, cost=FINE, keep=["features", "image_mask"], per_token=per_token).cut(batch)[1]
    assert short["input_ids"].shape == (2, 2)
    assert short["position_ids"].shape == (2, 2)
    assert short["embeddings"].shape == (2, 2, 6)
    assert short["square_attention_mask"].shape == (2, 1, 2, 2)
    assert short["image"].shape == (2, 3, 6, 6)
    assert short["image_mask"].shape == (2, 6, 6)
    assert short["label_of_row"].tolist() == [0, 2]
    assert short["names"] == ["a", "c"]
    assert [tuple(box.shape) for box in short["boxes"]] == [(4, 6), (3, 6)]
    assert short["nested"]["token_types"].shape == (2, 2)
    assert short["nested"]["features"].shape == (2, 6)


def test_a_batch_encoding_stays_one():
    from transformers import BatchEncoding

    part = Tokens(12, cost=FINE).cut(BatchEncoding(padded([6, 2, 6, 2])))[1]
    assert isinstance(part, BatchEncoding)
    assert part["input_ids"].shape == (2, 2)


def test_neighbouring_rows_of_full_width_are_views_and_what_is_trimmed_is_contiguous():
    batch = padded([6, 6, 2, 2])
    long, short = Tokens(12, cost=FINE).cut(batch)
    assert long["input_ids"].untyped_storage().data_ptr() == batch["input_ids"].untyped_storage().data_ptr()
    assert short["input_ids"].is_contiguous()
    assert Tokens(24, cost=Cost(fixed=1e6)).cut(batch)[0] is batch


def test_lengths_may_come_from_a_function_of_the_batch():
    Pair = namedtuple("Pair", "tokens targets")
    tokens = padded([2, 6, 2, 6])["input_ids"]
    targets = tokens.masked_fill(tokens == 0, -100)
    for batch in ((tokens, targets), Pair(tokens, targets), {"tokens": tokens, "targets": targets}):
        cut = Tokens(12, cost=FINE, length=lambda batch: [2, 6, 2, 6]).cut(batch)
        assert cut.row_numbers == ((1, 3), (0, 2))
        assert type(cut[1]) is type(batch)
        first = cut[1]["tokens"] if isinstance(batch, dict) else cut[1][0]
        assert torch.equal(first, tokens[[0, 2], :2])


def test_targets_that_count_beyond_the_length_given_are_refused():
    tokens = padded([2, 6, 2, 6])["input_ids"]
    split = Tokens(12, length=lambda batch: (batch[0] != 0).sum(1))
    with pytest.raises(
        SplitError, match=r"row 0 of batch\[1\] has targets beyond its length of 2 that are not -100.*ignored"
    ):
        split.cut((tokens, tokens))
    zero_is_ignored = Tokens(12, length=lambda batch: (batch[0] != 0).sum(1), ignored=0, cost=FINE)
    assert zero_is_ignored.cut((tokens, tokens))[1][1].shape == (2, 2)


def test_floating_point_targets_all_count():
    tokens = padded([2, 6])["input_ids"]
    with pytest.raises(SplitError, match=r"row 0 of batch\[1\] has targets beyond its length of 2"):
        Tokens(12, length=lambda batch: [2, 6]).cut((tokens, torch.zeros(2, 6)))


def test_labels_that_count_on_padding_are_kept_and_said_once():
    batch = padded([2, 6, 2, 6])
    batch["labels"][0, 3] = 5
    split = Tokens(12, cost=FINE)
    with pytest.warns(
        UserWarning, match="1 of 4 rows have labels other than -100 beyond their attention mask.*Set the labels"
    ):
        cut = split.cut(batch)
    part, rows = next((part, rows) for part, rows in zip(cut, cut.row_numbers, strict=True) if 0 in rows)
    assert part["labels"][rows.index(0), 3] == 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split.cut(batch)


def left(lengths: list[int], *, positions: bool) -> dict[str, Tensor]:
    width = max(lengths)
    mask = mask_of(lengths).flip(1)
    ids = (torch.arange(1, width + 1) + 100 * torch.arange(1, len(lengths) + 1)[:, None]) * mask
    labels = ids.masked_fill((mask.cumsum(1) < 2), -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return batch | ({"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if positions else {})


def test_left_padding_is_trimmed_where_positions_are_given():
    batch = left([2, 6, 2, 6], positions=True)
    cut = Tokens(12, cost=FINE).cut(batch)
    assert cut.row_numbers == ((1, 3), (0, 2))
    for key, whole in batch.items():
        assert torch.equal(cut[1][key], whole[[0, 2], 4:]), key


def test_left_padding_without_positions_is_kept_and_said_once():
    split = Tokens(12, cost=FINE)
    with pytest.warns(UserWarning, match="padded on the left and were not trimmed: without position_ids"):
        cut = split.cut(left([2, 6, 2, 6], positions=False))
    assert all(part["input_ids"].shape[1] == 6 for part in cut)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split.cut(left([2, 6, 2, 6], positions=False))


def test_left_padding_whose_first_token_counts_is_kept():
    batch = left([2, 6, 2, 6], positions=True)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    with pytest.warns(UserWarning, match="first token of a padded row counts as a target, predicted from padding"):
        cut = Tokens(12, cost=FINE).cut(batch)
    assert all(part["input_ids"].shape[1] == 6 for part in cut)


def test_question_answering_is_not_trimmed_because_its_softmax_runs_over_padding():
    batch = padded([2, 6, 2, 6]) | {"start_positions": torch.ones(4).long(), "end_positions": torch.ones(4).long()}
    with pytest.warns(UserWarning, match="question answering is a softmax over all positions"):
        cut = Tokens(12, cost=FINE).cut(batch)
    assert all(part["input_ids"].shape[1] == 6 for part in cut)


def test_a_row_without_any_real_token_has_length_1():
    batch = padded([3, 6])
    batch["attention_mask"][0] = 0
    batch["labels"][0] = -100
    assert sorted(part["input_ids"].shape[1] for part in Tokens(6, cost=FINE).cut(batch)) == [1, 6]


SAMPLES = [{"input_ids": list(range(length)), "name": f"row {length}"} for length in (2, 6, 3, 6, 2)]


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = torch.tensor([sample["input_ids"] + [0] * (longest - len(sample["input_ids"])) for sample in samples])
    return {"input_ids": ids, "name": [sample["name"] for sample in samples]}


def test_raw_samples_are_collated_per_micro_batch():
    cut = Tokens(12, collate=collate, cost=FINE).cut(SAMPLES)
    assert cut.row_numbers == ((1, 3), (2,), (0, 4))
    assert [tuple(part["input_ids"].shape) for part in cut] == [(2, 6), (1, 3), (2, 2)]
    assert cut[2]["name"] == ["row 2", "row 2"]


@pytest.mark.parametrize(
    ("samples", "length"),
    [
        ([(torch.zeros(3), 0), (torch.zeros(5), 1)], None),
        ([torch.zeros(3, 2), torch.zeros(5, 2)], None),
        ([[1, 2, 3], [1, 2, 3, 4, 5]], None),
        ([{"label": 1, "text": "ab", "frames": [1, 2, 3]}, {"label": 1, "text": "c", "frames": [1] * 5}], None),
        ([{"text": "a b c"}, {"text": "a b c d e"}], lambda sample: len(sample["text"].split())),
    ],
)
def test_the_length_of_a_sample_is_that_of_its_first_sequence_or_what_the_user_says(samples, length):
    cut = Tokens(5, collate=len, length=length).cut(samples)
    assert cut.cut is not None
    assert cut.cut.lengths == (5, 3)


def test_samples_without_a_sequence_are_refused():
    with pytest.raises(SplitError, match=r"sample of type dict has no sequence.*length being a function of a sample"):
        Tokens(5, collate=len).cut([{"text": "a b c"}])


def test_a_batch_that_is_collated_already_is_refused_with_the_fix():
    with pytest.raises(SplitError, match=r"cuts a list of raw samples, got a dict.*collate_fn=list"):
        Tokens(5, collate=collate).cut(padded([2, 3]))


@pytest.mark.parametrize("batch", [(torch.zeros(3, 4), torch.zeros(3)), {"input_ids": torch.zeros(3, 4)}])
def test_a_batch_whose_lengths_cannot_be_seen_is_refused_with_the_fix(batch):
    with pytest.raises(SplitError, match=r"cannot see how long the rows of this.*attention_mask.*length=.*collate="):
        Tokens(16).cut(batch)


def test_a_mask_that_is_not_rows_by_tokens_is_refused():
    batch = {"input_ids": torch.zeros(3, 4), "attention_mask": torch.ones(3, 1, 4, 4)}
    with pytest.raises(SplitError, match=r"attention_mask is a tensor of shape \(3, 1, 4, 4\).*length="):
        Tokens(16).cut(batch)


@pytest.mark.parametrize("lengths", [[1, 2], [1, 2, 5]])
def test_lengths_that_do_not_fit_the_batch_are_refused(lengths):
    with pytest.raises(SplitError, match=rf"gave {len(lengths)} lengths.*expected 3, one per row, none above.*of 4"):
        Tokens(16, length=lambda batch: lengths).cut(torch.zeros(3, 4))


@pytest.mark.parametrize("budget", [0, -5, 2.5, True, "8192"])
def test_a_budget_that_is_not_a_positive_whole_number_is_refused(budget):
    with pytest.raises(SplitError, match=r"Tokens\(.*\): the budget must be a whole number of tokens, 1 or more"):
        Tokens(budget)


@pytest.mark.parametrize("slack", [-0.1, 1.0, float("nan")])
def test_a_slack_that_is_no_share_is_refused(slack):
    with pytest.raises(SplitError, match=r"Tokens\(slack=.*\): expected a share of the cost"):
        Tokens(16, slack=slack)


def test_a_row_longer_than_the_budget_names_the_row_and_the_fix():
    with pytest.raises(SplitError, match=r"row 1 is 6 tokens long; Tokens\(budget=5\).*Use Tokens\(6\) or more"):
        Tokens(5).cut(padded([2, 6]))


def test_what_is_as_wide_as_the_padding_and_nobody_named_is_refused_by_name():
    batch = padded([2, 6, 2, 6]) | {"classes": torch.zeros(4, 6)}
    with pytest.raises(SplitError, match=r"batch\['classes'\] is 6 wide.*per_token=\['classes'\].*keep=\['classes'\]"):
        Tokens(12, cost=FINE).cut(batch)
    assert Tokens(12, cost=FINE, keep=["classes"]).cut(batch)[1]["classes"].shape == (2, 6)
    assert Tokens(12, cost=FINE, per_token=["classes"]).cut(batch)[1]["classes"].shape == (2, 2)


def test_a_width_of_its_own_in_an_earlier_batch_proves_that_a_field_is_not_per_token():
    split = Tokens(20, cost=FINE)
    split.cut(padded([2, 5, 2, 5]) | {"features": torch.zeros(4, 6)})
    assert split.cut(padded([2, 6, 2, 6]) | {"features": torch.zeros(4, 6)})[1]["features"].shape == (2, 6)


def test_where_no_row_is_shorter_nothing_is_trimmed_and_nothing_refused():
    cut = Tokens(12, cost=FINE).cut(padded([6, 6, 6, 6]) | {"classes": torch.zeros(4, 6)})
    assert {part["classes"].shape for part in cut} == {(2, 6)}


def test_a_name_that_no_field_of_this_width_has_is_refused():
    with pytest.raises(SplitError, match=r"per_token=\.\.\.\) names 'frames', and the batch has no such field"):
        Tokens(12, per_token=["frames"]).cut(padded([2, 6]))


def timed(split: Tokens, batch: dict[str, Any]) -> None:
    cut = split.cut(batch)
    if split.learn is not None:
        split.learn(cut, [0.1 * num_rows(part) for part in cut])


def test_a_cost_is_kept_unless_learning_was_asked_for():
    batch = padded([3] * 20 + [7] * 20)
    for split, learns in ((Tokens(7), False), (Tokens(7, cost=FINE), False), (Tokens(7, learn=True), True)):
        before = split.cost
        timed(split, batch)
        assert (split.cost != before) is learns
        assert (split.learn is not None) is learns


def test_a_cost_learnt_from_some_batches_stays_as_it_is_afterwards():
    batch, split = padded([3] * 20 + [7] * 20), Tokens(7, learn=2)
    for _ in range(2):
        timed(split, batch)
    assert split.cost != Cost()
    assert split.learn is None


def test_what_was_learnt_goes_on_in_another_run():
    batch, split, other = padded([3] * 20 + [7] * 20), Tokens(7, learn=3), Tokens(7, learn=3)
    timed(split, batch)
    other.load_state_dict(split.state_dict())
    for run in (split, other):
        for _ in range(2):
            timed(run, batch)
    assert other.cost == split.cost != Cost()
    assert other.learn is None
    given = Tokens(7, cost=FINE)
    given.load_state_dict(split.state_dict())
    assert given.cost == FINE


@pytest.mark.parametrize(("learn", "cost"), [(-1, None), (0.5, None), (True, FINE), (10, FINE)])
def test_learning_that_makes_no_sense_is_refused(learn, cost):
    with pytest.raises(SplitError, match=r"Tokens\(learn=.*expected True, False, or a number of batches"):
        Tokens(7, learn=learn, cost=cost)


def test_rows_that_belong_together_are_cut_together_and_padded_alike():
    batch = padded([2, 6, 2, 6, 5, 3, 1, 2])
    cut = Tokens(12, cost=FINE, groups=Stacked(2)).cut(batch)
    assert all((row + 4) % 8 in rows for rows in cut.row_numbers for row in rows)
    assert sorted(row for rows in cut.row_numbers for row in rows) == list(range(8))
    assert max(part["input_ids"].numel() for part in cut) <= 12
    with pytest.raises(SplitError, match=r"2 rows of up to 6 tokens belong together.*Use Tokens\(12, groups"):
        Tokens(11, groups=2).cut(batch)
    with pytest.raises(SplitError, match=r"groups of 1 to 2 rows; expected all of one size"):
        Tokens(12, groups=lambda batch: [0, 0, 1, 2, 3, 4, 5, 6]).cut(batch)


def padded_mask(lengths: list[int]) -> dict[str, torch.Tensor]:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": mask * 7, "attention_mask": mask}


def shapes(cut: MicroBatches) -> list[tuple[int, int]]:
    return [tuple(part["input_ids"].shape) for part in cut]


def largest(cut: MicroBatches) -> int:
    return max(rows * length for rows, length in shapes(cut))


def cost_of(cut: MicroBatches, cost: Cost) -> float:
    return sum(cost.of(rows, length) for rows, length in shapes(cut))


ALIKE = padded_mask([100] * 64)
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
    assert len(Tokens(4, cost=cost, slack=0.25).cut(padded_mask([1] * 4))) == 2
    assert len(Tokens(4, cost=cost, slack=0.2499).cut(padded_mask([1] * 4))) == 1


def test_two_percent_are_given_up_unless_told_otherwise():
    for share, micro_batches in ((0.0195, 2), (0.0205, 1)):
        cost = Cost(fixed=6400 * share / (1 - share), per_token=1.0, per_square=0.0)
        assert cost.fixed / (cost.fixed + 6400) == pytest.approx(share)
        assert len(Tokens(6400, cost=cost).cut(ALIKE)) == micro_batches


def test_no_micro_batch_is_made_too_small_for_the_longest_row():
    cut = Tokens(300, cost=Cost(fixed=1e-9), slack=0.9).cut(padded_mask([100, 1, 1, 1]))
    assert max(length for _, length in shapes(cut)) == 100
    assert largest(cut) == 100


@pytest.mark.parametrize("seed", range(12))
def test_ragged_rows_are_halved_by_the_same_rule(seed):
    """The slow twin: the cheapest cut under half of the largest micro-batch, again and again, while it costs little more."""
    rng = random.Random(seed)
    lengths = [max(1, min(200, round(rng.lognormvariate(3, 1)))) for _ in range(rng.randrange(3, 60))]
    batch, cost, slack = padded_mask(lengths), Cost(fixed=rng.choice([1.0, 20.0, 100.0])), rng.choice([0.01, 0.05, 0.3])
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
