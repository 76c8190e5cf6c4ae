"""Memory that runs out on one rank is everybody's; each rank fits its own rows."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from anybatch import Accumulator, Coupled, Fit, Objective, Update, plan, supervised
from tests.parallel.wrapped import (
    ScaledInfoNCE,
    Towers,
    Wrap,
    ddp,
    error,
    fsdp,
    labelled,
    largest,
    near_equal,
    network,
    own,
    pairs,
    whole,
)
from tests.processes.ranks import on_ranks, raised_on_ranks


def out_of_memory(objective: str, failing: Callable[[int, int], bool]) -> dict[str, Any]:
    """The last rank runs out of memory in micro-batches of more than 2 rows; all ranks start again, in smaller ones."""
    torch.manual_seed(1)
    model = (Towers() if objective == "coupled" else network()).double()
    batch = (
        pairs(20) if objective == "coupled" else tuple(t.double() if t.is_floating_point() else t for t in labelled(20))
    )
    own_loss = ScaledInfoNCE()
    twin = copy.deepcopy(model)
    if objective == "coupled":
        copy.deepcopy(own_loss)(twin(batch))[0].backward()
    else:
        F.cross_entropy(twin(batch[0]), batch[1]).backward()
    calls = [0]

    def check(rows: Any) -> None:
        calls[0] += 1
        if dist.get_rank() == dist.get_world_size() - 1 and failing(calls[0], len(rows[0])):
            raise torch.OutOfMemoryError("provoked")

    def loss(model: nn.Module, rows: Any) -> Tensor:
        check(rows)
        return F.cross_entropy(model(rows[0]), rows[1])

    def encode(model: nn.Module, rows: Any) -> Any:
        check(rows)
        return model(rows)

    wrapped = DistributedDataParallel(model)
    goal = Coupled(encode, own_loss) if objective == "coupled" else Objective(loss)
    accumulator = Accumulator(wrapped, goal, micro_batch=5)
    result = accumulator.backward(own(batch, near_equal(20)))
    return {
        "error": float((whole(wrapped) - whole(twin)).norm() / whole(twin).norm()),
        "retries": result.retries,
        "split": accumulator.split.size,
    }


def more_than_two(call: int, rows: int) -> bool:
    return rows > 2


def always(call: int, rows: int) -> bool:
    return True


def second_pass(call: int, rows: int) -> bool:
    return rows > 2 and call > 2


@pytest.mark.parametrize(
    ("objective", "failing"), [("rows", more_than_two), ("coupled", more_than_two), ("coupled", second_pass)]
)
def test_out_of_memory_on_one_rank_starts_all_again_in_smaller_micro_batches(objective, failing):
    told = on_ranks(2, out_of_memory, objective, failing)
    assert largest(told, "error") < 1e-12
    for rank in told:
        assert rank["retries"] == 1
        assert rank["split"] == 2


def test_memory_that_never_suffices_is_an_error_on_every_rank():
    for rank in raised_on_ranks(2, out_of_memory, "rows", always):
        assert rank.startswith("MemoryLimitError: memory ran out with a single row")


def fitted(wrap: Wrap, *, is_limited: bool = True) -> dict[str, Any]:
    """Each rank chooses for its own rows: the last has half the memory; the gradient is the whole batch's."""
    torch.manual_seed(1)
    model = network(torch.float64)
    twin = copy.deepcopy(model)
    batch = tuple(t.double() if t.is_floating_point() else t for t in labelled(64))
    goal, rows = supervised(nn.CrossEntropyLoss()), own(batch, near_equal(64))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.0)
    alone = plan(twin, optimizer, goal, rows, memory="1GiB", checkpointing=False)
    memory = alone.peak(16 if dist.get_rank() == 0 else 8)
    most = max(size for size in range(1, 32) if alone.peak(size) <= memory)
    F.cross_entropy(twin(batch[0]), batch[1]).backward()
    wrapped = wrap(model)
    buckets = sum(p.nbytes for p in model.parameters()) if wrap is ddp else 0
    fit = Fit(memory + buckets, margin=0.0) if is_limited else Fit()
    Update(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.0), goal, micro_batch=fit)(rows)
    assert fit.choice is not None
    return {"size": fit.choice.size, "most": most, "reason": fit.choice.reason, "error": error(wrapped, whole(twin))}


def test_fit_chooses_for_the_rows_of_each_rank_beside_the_buckets_of_ddp():
    told = on_ranks(2, fitted, ddp)
    assert [rank["size"] for rank in told] == [rank["most"] for rank in told]
    assert largest(told, "error") < 1e-12


def test_fit_doubles_where_a_sharded_model_cannot_be_planned_and_says_why():
    told = on_ranks(2, fitted, fsdp, is_limited=False)
    for rank in told:
        assert rank["reason"].startswith("PlanError: this ")
        assert "is sharded by fully_shard" in rank["reason"]
    assert largest(told, "error") < 1e-12


def test_fit_refuses_a_limit_where_a_sharded_model_cannot_be_planned():
    for rank in raised_on_ranks(2, fitted, fsdp):
        assert rank.startswith("MemoryLimitError: Fit(")
        assert "is sharded by fully_shard" in rank
