"""What DDP and fully_shard ask for, and what is refused by name: parameters nobody uses, comm hooks, static graphs."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from anybatch import Accumulator, Objective, supervised
from tests.parallel.wrapped import (
    LABELS,
    error,
    labelled,
    largest,
    near_equal,
    network,
    own,
)
from tests.processes.ranks import on_ranks, raised_on_ranks
from tests.reference import whole_batch_gradient


class Branched(nn.Module):
    """The second branch is taken by the micro-batches whose first number says so."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch, self.never = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, LABELS)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.trunk(inputs)
        if inputs[0, 0] > 0:
            hidden = hidden + self.branch(hidden)
        output: Tensor = self.head(hidden.tanh())
        return output


def branched() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    inputs, targets = labelled(16)
    inputs[:, 0] = -1.0
    inputs[0:2, 0] = 1.0  # the first micro-batch of rank 0, never the last of any rank
    return Branched(), (inputs, targets)


def by_pairs(model: nn.Module, batch: Any) -> Tensor:
    parts = [F.cross_entropy(model(batch[0][i : i + 2]), batch[1][i : i + 2]) for i in range(0, len(batch[0]), 2)]
    return torch.stack(parts).mean()


def counts_of_pairs() -> list[int]:
    size = dist.get_world_size()
    return [6, 10] if size == 2 else [6, 4, 6] if size == 3 else [4] * 4


def unused_parameters() -> dict[str, float]:
    model, batch = branched()
    reference = whole_batch_gradient(model, by_pairs, batch)
    wrapped = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=2).backward(own(batch, counts_of_pairs()))
    return {"error": error(wrapped, reference), "never": float(wrapped.module.never.weight.grad is not None)}


def test_parameters_that_some_micro_batches_do_not_use_are_exact_and_one_that_no_rank_used_has_no_gradient():
    told = on_ranks(2, unused_parameters)
    assert largest(told, "error") < 5e-7
    assert largest(told, "never") == 0


def used_once_then_not() -> list[float]:
    """The first batch is one micro-batch on each rank, which nothing before it proves to fit: it is summed by hand."""
    model, (inputs, targets) = branched()
    wrapped = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    accumulator = Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=8)
    found = []
    for sign in (1.0, -1.0, 1.0):
        inputs[:, 0] = sign
        reference = whole_batch_gradient(
            model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), (inputs, targets)
        )
        wrapped.zero_grad()
        accumulator.backward(own((inputs, targets), [8, 8]))
        found.append(error(wrapped, reference))
    return found


def test_a_parameter_may_be_used_in_one_update_and_not_in_the_next_whoever_sums_the_first():
    assert max(max(rank) for rank in on_ranks(2, used_once_then_not)) < 5e-7


def _halved(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    state[0] += 1
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def comm_hook() -> dict[str, float]:
    model, batch = network(), labelled(30)
    reference = whole_batch_gradient(model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), batch)
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    calls = [0]
    wrapped.register_comm_hook(calls, _halved)
    objective = supervised(nn.CrossEntropyLoss())
    Accumulator(wrapped, objective, micro_batch=2).backward(own(batch, near_equal(30)))
    return {"error": error(wrapped, reference), "calls": calls[0]}


def test_a_comm_hook_is_called_once_per_bucket_and_the_gradient_is_that_of_the_whole_batch():
    told = on_ranks(2, comm_hook)
    assert largest(told, "error") < 5e-7
    assert [rank["calls"] for rank in told] == [1, 1]


def unused_parameters_unannounced() -> float:
    model, batch = branched()
    wrapped = DistributedDataParallel(model)
    Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=2).backward(own(batch, counts_of_pairs()))
    return 0.0


def static_graph() -> float:
    wrapped = DistributedDataParallel(network(), static_graph=True)
    Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=2)
    return 0.0


def not_called() -> float:
    wrapped = DistributedDataParallel(network())
    objective = Objective(lambda model, rows: F.cross_entropy(model.module(rows[0]), rows[1]))
    Accumulator(wrapped, objective, micro_batch=2).backward(own(labelled(8), near_equal(8)))
    return 0.0


def comm_hook_refused() -> float:
    wrapped = DistributedDataParallel(network())
    wrapped.register_comm_hook([0], _halved)
    objective = supervised(nn.CrossEntropyLoss())
    Accumulator(wrapped, objective, micro_batch=2, drop_nonfinite=True).backward(own(labelled(8), near_equal(8)))
    return 0.0


def sharded_and_tensor_parallel() -> float:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(network(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    Accumulator(fully_shard(model, mesh=mesh["data"]), supervised(nn.CrossEntropyLoss()), micro_batch=2)
    return 0.0


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        (static_graph, "static_graph=True"),
        (not_called, "not model.module(...)"),
        (comm_hook_refused, "has the comm hook _halved, but dropping micro-batches"),
        (unused_parameters_unannounced, "find_unused_parameters=True"),
        (sharded_and_tensor_parallel, "cut by tensor parallelism too"),
    ],
)
def test_what_would_be_wrong_is_refused_by_name_on_every_rank(scenario, message):
    for rank in raised_on_ranks(2, scenario):
        assert rank.startswith("ParallelError: ")
        assert message in rank
