"""Past their last meeting ranks no longer talk: one that fails there ends, and the others end with it."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from anybatch import Accumulator, Objective
from anybatch.app.training.launch import is_lost_rank
from tests.parallel.wrapped import fsdp, labelled, network
from tests.processes.forked import started

PATIENCE = 90.0
"""Seconds that a rank waits for the others: on the tree before, the rank that failed gathered, and all waited so long."""
ENDED, LOST = 3, 4


class OutOfMemoryInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("provoked")


def failing_rank(rank: int, folder: Path, kind: str, stage: str) -> int:
    """Rank 1 runs out of memory in its last micro-batch, or where `stage` says; both say how they ended."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=PATIENCE))
    model = DistributedDataParallel(network()) if kind == "ddp" else fsdp(network())
    calls = [0]

    def loss(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
        calls[0] += 1
        outputs = model(rows[0])
        if rank == 1 and calls[0] == 2:
            if stage == "forward":
                raise torch.OutOfMemoryError("provoked")
            outputs = OutOfMemoryInBackward.apply(outputs)
        return F.cross_entropy(outputs, rows[1])

    def units(rows: tuple[Tensor, Tensor]) -> int:
        if rank == 1 and stage == "counting":
            raise torch.OutOfMemoryError("provoked")
        return len(rows[0])

    try:
        Accumulator(model, Objective(loss, units), micro_batch=4).backward(labelled(8))
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(LOST if is_lost_rank(error) else ENDED)
    return 0


@pytest.mark.parametrize(
    ("kind", "stage"), [("ddp", "forward"), ("ddp", "backward"), ("ddp", "counting"), ("fsdp2", "backward")]
)
def test_out_of_memory_where_ranks_cannot_agree_is_an_error_and_never_a_new_collective(tmp_path, kind, stage):
    with (
        started(failing_rank, 1, tmp_path, kind, stage) as second,
        started(failing_rank, 0, tmp_path, kind, stage) as first,
    ):
        ended, other = second.wait(), first.wait()
    assert ended.returncode == ENDED, ended.stdout + ended.stderr
    assert ended.stdout.startswith("MemoryLimitError: memory ran out on rank 1 (OutOfMemoryError: provoked)")
    assert other.returncode == (ENDED if stage == "counting" else LOST), other.stdout + other.stderr
