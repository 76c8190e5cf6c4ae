"""Rows over ranks: a coupled loss sees each rank's in their own order, and a sampler that repeats some is told of."""

import copy
import warnings

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from anybatch import Accumulator, Coupled, Tokens, supervised
from tests.guards.test_batches_not_misread import FINE, Normed, Reader, listwise, ragged, read
from tests.processes.ranks import on_ranks
from tests.reference import gradient


def sorted_rows(batch_norm: str | None) -> dict[str, float]:
    """How far a listwise loss is off whose rows were sorted by length on each rank; and how far in the order of the cut."""
    torch.manual_seed(0)
    model, batch = Normed() if batch_norm else Reader(), ragged()
    twin, mistaken = copy.deepcopy(model), copy.deepcopy(model)
    listwise(read(twin, batch)).backward()
    reference = gradient(twin.parameters())
    rank = dist.get_rank()
    own = _half(batch, rank)
    wrapped = DistributedDataParallel(model)
    split = Tokens(24, cost=FINE)
    Accumulator(wrapped, Coupled(read, listwise), micro_batch=split, batch_norm=batch_norm).backward(own)
    order = [8 * half + row for half in (0, 1) for part in split.cut(_half(batch, half)).row_numbers for row in part]
    listwise(read(mistaken, batch)[order]).backward()
    return {
        "error": float((gradient(wrapped.parameters()) - reference).norm() / reference.norm()),
        "as cut": float((gradient(mistaken.parameters()) - reference).norm() / reference.norm()),
    }


def _half(batch, half):
    return {name: value[8 * half : 8 * half + 8] for name, value in batch.items()}


def test_a_coupled_loss_over_ranks_sees_each_ranks_rows_in_their_own_order():
    for told in on_ranks(2, sorted_rows, None):
        assert told["error"] < 1e-12
        assert told["as cut"] > 0.05


def test_so_it_does_with_exact_batch_norm():
    for told in on_ranks(2, sorted_rows, "exact"):
        assert told["error"] < 1e-12


def sampled(rows: int) -> list[str]:
    """What is said when a plain loader with torch's own sampler is learnt from."""
    data = TensorDataset(torch.randn(rows, 3), torch.zeros(rows).long())
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    accumulator = Accumulator(
        DistributedDataParallel(torch.nn.Linear(3, 2)), supervised(torch.nn.CrossEntropyLoss()), micro_batch=2
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for batch in loader:
            accumulator.backward(batch)
    return [str(warning.message) for warning in said if "DistributedSampler" in str(warning.message)]


def test_a_sampler_that_repeats_rows_is_said_once_on_the_first_rank():
    first, second = on_ranks(2, sampled, 13)
    assert len(first) == 1
    assert "deals 13 rows to 2 ranks and repeats 1 of them" in first[0]
    assert second == []


def test_one_that_repeats_none_is_not():
    assert on_ranks(2, sampled, 12) == [[], []]
