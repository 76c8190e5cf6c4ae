"""Dropout by row over ranks: the weights of one process, however rows were dealt."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from anybatch import GlobalBatches, Update, row_dropout, supervised
from anybatch.core import take_rows
from anybatch.parallel import deal_rows
from tests.processes.ranks import on_ranks

ROWS, BATCH = 49, 12
"""The last batch has one row: with two ranks, one has none."""


def learn(swap: bool, dealt: str, wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel) -> Tensor:
    """The weights after two epochs, on as many ranks as there are."""
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.3), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
    generator = torch.Generator().manual_seed(4)
    data = TensorDataset(torch.randn(ROWS, 5, generator=generator), torch.randint(0, 3, (ROWS,), generator=generator))
    model = row_dropout(model) if swap else model
    if dist.is_initialized():
        model = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    update = Update(model, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=4)
    lengths = [1 + row % 30 for row in range(ROWS)] if dealt == "work" else None
    batches = GlobalBatches(data, BATCH, seed=1, lengths=lengths)
    for _ in range(2):
        for batch in batches.loader() if dealt != "by hand" else by_hand(batches, data):
            update(batch)
    weights = [parameter.detach() for parameter in model.parameters()]
    return torch.cat([(one.full_tensor() if isinstance(one, DTensor) else one).flatten() for one in weights])


def by_hand(batches: GlobalBatches, data: TensorDataset) -> Any:
    """Plain batches: the rows of rank 0, then those of rank 1; the last, of one row, is left out."""
    for number in range(ROWS // BATCH):
        rows = batches.rows_of(0)[number * BATCH :][:BATCH]
        size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        yield take_rows(data.tensors, [rows[row] for row in deal_rows(BATCH, size)[rank]])


@pytest.mark.parametrize("dealt", ["rows", "work", "by hand"])
def test_two_ranks_end_with_the_weights_of_one_process(dealt: str):
    alone = learn(True, dealt)
    for weights in on_ranks(2, learn, True, dealt):
        assert (weights - alone).norm() / alone.norm() < 1e-6


def test_sharded_over_two_ranks_too():
    alone = learn(True, "work")
    for weights in on_ranks(2, learn, True, "work", fully_shard):
        assert (weights - alone).norm() / alone.norm() < 1e-6


def test_with_stock_dropout_they_do_not():
    alone = learn(False, "rows")
    assert (on_ranks(2, learn, False, "rows")[0] - alone).norm() / alone.norm() > 1e-2
