"""Rows over ranks: a coupled loss sees each rank's in their own order."""

import copy

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from anybatch import Accumulator, Coupled, Tokens
from tests.core.test_batches_not_misread import FINE, Normed, Reader, listwise, ragged, read
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
