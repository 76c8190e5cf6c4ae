"""Batches dealt to ranks: every row once, the same batches for any number of ranks, resumable on any other."""

import random
from statistics import fmean

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from anybatch import Accumulator, BatchError, CheckpointError, Cost, Dealt, GlobalBatches, repeated_rows, supervised
from anybatch.parallel import warn_of_repeated_rows
from anybatch.parallel.dealing import deal_by_cost, deal_rows
from anybatch.ragged.cheapest_cut import best_cut

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital.*is deprecated")  # torchdata 0.11 calls it


def dealt(ranks, **options):
    """What each rank gets in one epoch."""
    return [list(GlobalBatches(range(104), 64, rank=rank, ranks=ranks, **options)) for rank in range(ranks)]


def whole(per_rank):
    """The batches, put together again by row number."""
    batches = []
    for parts in zip(*per_rank, strict=True):
        batch = {number: row for part in parts for number, row in zip(part.row_numbers, part, strict=True)}
        assert sorted(batch) == list(range(parts[0].num_rows))
        assert sum(map(len, parts)) == len(batch)
        batches.append([batch[number] for number in sorted(batch)])
    return batches


def test_40_rows_over_3_ranks_are_14_13_13():
    assert [len(rows) for rows in deal_rows(40, 3)] == [14, 13, 13]
    assert [[len(part) for part in parts] for parts in dealt(3)] == [[22, 14], [21, 13], [21, 13]]


@pytest.mark.parametrize("options", [{}, {"lengths": [1 + row % 50 for row in range(104)]}], ids=["rows", "work"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 50])
def test_any_number_of_ranks_gets_the_same_batches_with_no_row_twice_and_none_dropped(ranks, options):
    batches = whole(dealt(ranks, **options))
    assert batches == whole(dealt(1))
    assert sorted(row for batch in batches for row in batch) == list(range(104))


def test_distributed_sampler_gives_other_batches_and_rows_twice():
    def rows(ranks):
        samplers = [DistributedSampler(range(104), ranks, rank) for rank in range(ranks)]
        return [row for sampler in samplers for row in sampler]

    assert len(rows(3)) > len(set(rows(3))) == 104
    first_batches = [{*rows(ranks)[: 64 // ranks]} for ranks in (1, 2)]
    assert first_batches[0] != first_batches[1]


def test_each_pass_is_another_epoch_and_each_epoch_the_same_again():
    batches = GlobalBatches(range(104), 64)
    first, second = list(batches), list(batches)
    assert first != second
    batches.set_epoch(0)
    assert list(batches) == first
    assert list(GlobalBatches(range(104), 64, seed=1)) != first


def test_rows_as_they_lie_or_in_an_order_of_the_users():
    assert list(GlobalBatches(range(5), 2, shuffle=False)) == [[0, 1], [2, 3], [4]]
    backwards = GlobalBatches(range(5), 2, order=lambda epoch: [4, 3, 2, 1, 0][epoch:], rank=1, ranks=2)
    assert len(backwards) == 3
    assert list(backwards) == [[3], [1], []]
    assert len(backwards) == 2
    assert list(backwards) == [[2], [0]]


def test_a_rank_without_a_row_gets_as_many_batches_and_a_stand_in():
    data = TensorDataset(torch.arange(5.0) + 10)
    batches = GlobalBatches(data, 4, shuffle=False, rank=3, ranks=4)
    first, last = batches.loader()
    assert first.batch[0].tolist() == [13.0]
    assert first.row_numbers == (3,)
    assert not first.is_stand_in
    assert last == Dealt(last.batch, (), 1)
    assert last.is_stand_in
    assert last.batch[0].tolist() == [14.0]


def test_a_plain_loader_takes_it_as_any_batch_sampler():
    loader = DataLoader(TensorDataset(torch.arange(104)), batch_sampler=GlobalBatches(range(104), 64))
    assert [len(rows) for (rows,) in loader] == [64, 40]


def collate_sum(samples):
    return torch.stack([row for (row,) in samples]), len(samples)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 3, 7])
def test_saved_on_two_ranks_and_resumed_on_four_the_rest_is_as_if_never_stopped(workers, stop):
    data, options = TensorDataset(torch.arange(104)), {"num_workers": workers, "loader": StatefulDataLoader}

    def loader(rank, ranks, lengths=None):
        batches = GlobalBatches(data, 15, rank=rank, ranks=ranks, seed=5, lengths=lengths)
        return batches.loader(collate_fn=collate_sum, **options)

    lengths = [1 + row % 9 for row in range(104)]
    before = loader(1, 2)
    passing = iter(before)
    for _ in range(stop):
        next(passing)
    state = before.state_dict()
    resumed = [loader(rank, 4, lengths) for rank in range(4)] if workers == 0 else [loader(0, 1)]
    for one in resumed:
        one.load_state_dict(state)
    rest = [list(one) for one in resumed]
    reference = GlobalBatches(data, 15, seed=5, shuffle=True)
    assert len({len(parts) for parts in rest}) == 1
    for number, parts in enumerate(zip(*rest, strict=True)):
        rows = {n: row for part in parts for n, row in zip(part.row_numbers, part.batch[0].tolist(), strict=True)}
        expected = reference.rows_of(0)[(stop + number) * 15 :][:15]
        assert [rows[n] for n in sorted(rows)] == expected
    assert stop + len(rest[0]) == 7
    following = [row for part in resumed[0] for row in part.batch[0].tolist()]
    assert len(resumed) > 1 or following == reference.rows_of(1)


def test_without_torchdata_the_sampler_itself_says_where_it_is():
    batches = GlobalBatches(range(104), 15, rank=0, ranks=2)
    whole_epoch = list(GlobalBatches(range(104), 15, rank=0, ranks=3))
    passing = iter(batches)
    next(passing), next(passing)
    other = GlobalBatches(range(104), 15, rank=0, ranks=3)
    other.load_state_dict(batches.state_dict())
    assert list(other) == whole_epoch[2:]
    assert len(list(other)) == 7
    assert other.state_dict()["epoch"] == 2


def test_a_position_in_other_batches_is_refused_with_both_values():
    state = GlobalBatches(range(104), 15).state_dict()
    with pytest.raises(CheckpointError, match=r"batch_size=15, and this run has 16.*Resume with"):
        GlobalBatches(range(104), 16).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"seed=0, and this run has 3"):
        GlobalBatches(range(104), 15, seed=3).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: expected"),
        ({"rank": 2, "ranks": 2}, "rank=2 of ranks=2: expected a rank from 0 to 1"),
        ({"lengths": [1, 2]}, "lengths= has 2 entries for 8 rows"),
    ],
)
def test_options_that_make_no_sense_name_the_value_and_the_fix(options, message):
    with pytest.raises(BatchError, match=message):
        GlobalBatches(range(8), **({"batch_size": 4} | options))


def test_a_row_of_no_length_is_named():
    with pytest.raises(BatchError, match="row 1 is 0 tokens long"):
        deal_by_cost([3, 0], 2, Cost())


def largest_over_mean(parts, lengths, cost):
    """How much longer the slowest rank works than the mean, each with the cheapest cut of its rows."""
    works = [best_cut([lengths[row] for row in rows], 4096, cost).cost(cost) for rows in parts]
    return max(works) / fmean(works)


@pytest.mark.parametrize(("rows", "ranks"), [(128, 2), (128, 4), (512, 8)])
def test_ranks_have_equal_work_within_two_percent_and_equal_rows_do_not(rows, ranks):
    draw, cost = random.Random(0), Cost()
    batches = [[min(1024, max(4, int(draw.lognormvariate(4, 1)))) for _ in range(rows)] for _ in range(10)]
    by_work = fmean(largest_over_mean(deal_by_cost(lengths, ranks, cost), lengths, cost) for lengths in batches)
    by_rows = fmean(largest_over_mean(deal_rows(rows, ranks), lengths, cost) for lengths in batches)
    assert by_work < 1.02
    assert by_rows > 1.1 or (ranks == 2 and by_rows > 1.05)


def test_lengths_may_be_a_function_of_the_dataset():
    texts = ["a", "bb", "ccccccccc", "d"]
    batches = GlobalBatches(texts, 4, shuffle=False, ranks=2, rank=0, lengths=lambda data: [len(text) for text in data])
    assert list(batches) == [[2]]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_update_takes_a_dealt_batch_and_a_stand_in_counts_for_nothing(reduction):
    model = torch.nn.Linear(1, 1)
    criterion = torch.nn.MSELoss(reduction=reduction)
    accumulator = Accumulator(model, supervised(criterion), micro_batch=2)
    x = torch.arange(6.0).reshape(3, 2)
    result = accumulator.backward(Dealt((x[:, :1], x[:, 1:]), (4, 0, 2), 5))
    expected = torch.autograd.grad(criterion(model(x[:, :1]), x[:, 1:]), model.weight)
    assert result.units == 3
    torch.testing.assert_close(model.weight.grad, expected[0])
    model.zero_grad()
    result = accumulator.backward(Dealt((x[:1, :1], x[:1, 1:]), (), 5))
    assert result.units == 0
    assert model.weight.grad.item() == 0


@pytest.mark.parametrize(("rows", "ranks", "repeated"), [(1001, 2, 1), (1001, 4, 3), (1000, 4, 0), (3, 8, 5)])
def test_rows_that_a_distributed_sampler_deals_twice_are_counted(rows, ranks, repeated):
    samplers = [DistributedSampler(range(rows), num_replicas=ranks, rank=rank) for rank in range(ranks)]
    dealt_rows = [row for sampler in samplers for row in sampler]
    assert len(dealt_rows) - len(set(dealt_rows)) == repeated, "what torch does"
    assert repeated_rows(samplers[0]) == repeated
    assert repeated_rows(DataLoader(range(rows), sampler=samplers[0])) == repeated
    assert repeated_rows(DistributedSampler(range(rows), num_replicas=ranks, rank=0, drop_last=True)) == 0
    assert repeated_rows(DataLoader(range(rows))) == 0


def test_a_sampler_that_repeats_rows_is_said_by_the_first_rank():
    loader = DataLoader(range(35), sampler=DistributedSampler(range(35), num_replicas=3, rank=0))
    with pytest.warns(
        UserWarning, match=r"deals 35 rows to 3 ranks and repeats 1 of them.*GlobalBatches.*leaves 2 out"
    ):
        warn_of_repeated_rows(loader, rank=0, ranks=3)
    for rank, ranks in ((1, 3), (0, 1)):  # warnings are errors
        warn_of_repeated_rows(loader, rank=rank, ranks=ranks)
    warn_of_repeated_rows(DataLoader(range(35)), rank=0, ranks=3)
