"""BatchNorm over all ranks' rows."""

import contextlib
import copy
import re
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from anybatch import Accumulator, AnybatchError, Coupled, Objective, Update, info_nce, supervised
from tests.parallel.wrapped import (
    LABELS,
    Wrap,
    cases,
    convolutional,
    ddp,
    ddp_sync_norm,
    difference,
    fsdp,
    fsdp_units,
    gathered,
    hsdp,
    labelled,
    largest,
    near_equal,
    norms_of,
    own,
    signals,
    whole,
)
from tests.processes.ranks import on_ranks


def exact_norm(wrap: Wrap, counts: list[int] | None = None) -> dict[str, float]:
    """BatchNorm pooled over all ranks' rows, two residual branches, uneven numbers of micro-batches."""
    model, batch = convolutional(), signals(14)
    twin = copy.deepcopy(model)
    wanted = F.cross_entropy(twin(batch[0]), batch[1])
    wanted.backward()
    given = counts or near_equal(14)
    given = [*given, *[0] * (dist.get_world_size() - len(given))]
    rows = own(batch, given)
    wrapped = wrap(copy.deepcopy(model))
    objective = supervised(nn.CrossEntropyLoss())
    result = Accumulator(wrapped, objective, micro_batch=2 + 2 * dist.get_rank(), batch_norm="exact").backward(
        rows if len(rows[0]) else None
    )
    is_held = DistributedDataParallel._active_ddp_module is not None
    plain = DistributedDataParallel(copy.deepcopy(model))
    own_part = own(batch, near_equal(14))
    F.cross_entropy(plain(own_part[0]), own_part[1]).backward()
    return {
        "error": float((whole(wrapped) - whole(twin)).norm() / whole(twin).norm()),
        "per_rank": float((whole(plain) - whole(twin)).norm() / whole(twin).norm()),
        "running": float((norms_of(wrapped) - norms_of(twin)).abs().max()),
        "tracked": float(max(b for n, b in wrapped.named_buffers() if "tracked" in n)) - 1,
        "loss": abs(float(result.loss) - float(wanted.detach())),
        "is_held": is_held,
    }


@cases(
    (2, exact_norm, ddp),
    (2, exact_norm, ddp, [14]),
    (2, exact_norm, ddp_sync_norm),
    (2, exact_norm, fsdp_units),
    (2, exact_norm, hsdp),
    (2, exact_norm, fsdp_units, [14]),
    (3, exact_norm, ddp, [14]),
    (3, exact_norm, fsdp_units),
    (3, exact_norm, fsdp_units, [14]),
)
def test_exact_batch_norm_pools_over_ranks(size, scenario, arguments):
    """`[14]`: the first rank has all rows."""
    told = on_ranks(size, scenario, *arguments)
    for key in ("error", "running", "loss"):
        assert largest(told, key) < 1e-12
    assert largest(told, "tracked") == 0
    assert largest(told, "is_held") == 0


def test_statistics_of_each_rank_alone_are_far_off():
    assert min(rank["per_rank"] for rank in on_ranks(2, exact_norm, ddp)) > 0.1


def exact_norm_updates(wrap: Wrap) -> dict[str, float]:
    """AdamW over batches of which one leaves the last rank without rows; then the model in eval, as it is used."""
    model, batch = convolutional(bias=False), signals(14)
    twin, wrapped = copy.deepcopy(model), wrap(copy.deepcopy(model))
    objective = supervised(nn.CrossEntropyLoss())
    update = Update(
        wrapped,
        torch.optim.AdamW(wrapped.parameters(), lr=0.01),
        objective,
        micro_batch=2 + dist.get_rank(),
        batch_norm="exact",
        clip_norm=0.5,
    )
    alone = torch.optim.AdamW(twin.parameters(), lr=0.01)
    size = dist.get_world_size()
    for given in (near_equal(14), [14 - (size - 2), *[1] * (size - 2), 0], near_equal(14)[::-1], near_equal(14)):
        rows = own(batch, given)
        update(rows if len(rows[0]) else None)
        alone.zero_grad()
        F.cross_entropy(twin(batch[0]), batch[1]).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        alone.step()
    running = float((norms_of(wrapped) - norms_of(twin)).abs().max())
    wrapped.eval()
    twin.eval()
    with torch.no_grad():
        outputs = float((wrapped(batch[0]) - twin(batch[0])).abs().max())
    return {"error": difference(wrapped, twin), "running": running, "outputs": outputs}


@cases((2, exact_norm_updates, ddp), (2, exact_norm_updates, fsdp_units), (3, exact_norm_updates, fsdp_units))
def test_updates_with_exact_batch_norm_are_those_of_one_process(size, scenario, arguments):
    told = on_ranks(size, scenario, *arguments)
    for key in ("error", "running", "outputs"):
        assert largest(told, key) < 1e-12


def exact_norm_low_precision() -> dict[str, float]:
    """A gradient of 256 + 1 + 1 + 1 on each rank: 259 in fp32, and not a number of bf16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), mp_policy=policy)
    weights = torch.tensor([256.0, 1.0, 1.0, 1.0])
    objective = Objective(lambda model, rows: (model(rows[0])[:, 0].float() * rows[1]).sum(), reduction="sum")
    Accumulator(model, objective, micro_batch=1, batch_norm="exact").backward((torch.randn(4, 3), weights))
    return {"error": float(gathered(model[2].bias.grad)[0]) - 259 * dist.get_world_size()}


def test_gradients_of_bf16_micro_batches_that_run_together_are_summed_in_fp32():
    assert largest(on_ranks(2, exact_norm_low_precision), "error") == 0


def exact_norm_error_in_a_forward() -> dict[str, float]:
    """Every rank fails in its second micro-batch, when the first has run and the others have begun; the next batch is right."""
    model, batch = convolutional(), signals(14)
    twin, wrapped = copy.deepcopy(model), fsdp_units(copy.deepcopy(model))
    F.cross_entropy(twin(batch[0]), batch[1]).backward()
    calls = [0]

    def loss(model: nn.Module, rows: Any) -> Tensor:
        calls[0] += 1
        number = calls[0]
        outputs = model(rows[0])
        if number == 2:
            raise ValueError("once")
        return F.cross_entropy(outputs, rows[1])

    accumulator = Accumulator(wrapped, Objective(loss), micro_batch=2, batch_norm="exact")
    with contextlib.suppress(ValueError):
        accumulator.backward(own(batch, near_equal(14)))
    left = sum(parameter.grad is not None for parameter in wrapped.parameters())
    accumulator.backward(own(batch, near_equal(14)))
    return {"error": float((whole(wrapped) - whole(twin)).norm() / whole(twin).norm()), "left": left}


def test_after_an_error_among_micro_batches_that_run_together_a_sharded_model_goes_on():
    told = on_ranks(2, exact_norm_error_in_a_forward)
    assert largest(told, "left") == 0
    assert largest(told, "error") < 1e-12


def micro_norm(wrap: Wrap) -> dict[str, float]:
    """Each micro-batch its own statistics; running statistics merged over micro-batches and ranks, and equal on them."""
    wrapped, batch = wrap(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, LABELS)).double()), labelled(14)
    batch = (batch[0].double(), batch[1])
    twin = nn.BatchNorm1d(6).double()
    twin(batch[0])
    given = [6, 8] if dist.get_world_size() == 2 else [6, 8, *[0] * (dist.get_world_size() - 2)]
    rows = own(batch, given)
    Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=3, batch_norm="micro").backward(
        rows if len(rows[0]) else None
    )
    return {"running": float((norms_of(wrapped) - norms_of(twin)).abs().max())}


@cases((2, micro_norm, ddp), (2, micro_norm, fsdp), (3, micro_norm, ddp))
def test_running_statistics_are_merged_over_ranks(size, scenario, arguments):
    assert largest(on_ranks(size, scenario, *arguments), "running") < 1e-12


def unchosen_norm() -> str:
    """What the warning says where nobody chose."""
    model, batch = convolutional(), signals(14)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accumulator = Accumulator(DistributedDataParallel(model), supervised(nn.CrossEntropyLoss()), micro_batch=3)
        accumulator.backward(own(batch, near_equal(14)))
    return next(str(warning.message) for warning in caught if "BatchNorm" in str(warning.message))


def test_the_warning_counts_the_micro_batches_of_all_ranks():
    for told in on_ranks(2, unchosen_norm):
        assert re.search(
            r"see this batch as 6 micro-batches of at most 3 rows.*verify\(model, objective, batch\)", told
        )


def failing_before_statistics_are_pooled() -> str:
    """One rank's last micro-batch has a single row, of which BatchNorm has no variance; the other rank's has none such."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    coupled = Coupled(lambda model, part: (model(part[0]), model(part[1])), info_nce(0.2))
    accumulator = Accumulator(
        DistributedDataParallel(model), coupled, micro_batch=1 + dist.get_rank(), batch_norm="micro"
    )
    try:
        accumulator.backward((torch.randn(4, 6), torch.randn(4, 6)))
    except AnybatchError as error:
        return type(error).__name__
    return "no error"


def test_a_rank_that_fails_before_statistics_are_pooled_ends_the_others_with_an_error():
    assert on_ranks(2, failing_before_statistics_are_pooled) == ["BatchError", "ParallelError"]
