"""Models in DDP or sharded by fully_shard: the gradient and the numbers of the whole batch, on every rank."""

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from anybatch import Accumulator, Mean, Objective, PerRow, Sum, supervised
from anybatch.core import take_rows
from tests.parallel.wrapped import (
    BOTH,
    LABELS,
    TOKENS,
    Wrap,
    cases,
    ddp,
    ddp_views,
    error,
    fsdp,
    hsdp,
    labelled,
    largest,
    near_equal,
    network,
    num_targets,
    own,
    ragged,
    tokens,
    whole,
)
from tests.processes.ranks import on_ranks, raised_on_ranks
from tests.reference import whole_batch_gradient


def uneven_rows(wrap: Wrap) -> dict[str, float]:
    model, batch = network(), labelled(40)
    reference = whole_batch_gradient(model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), batch)
    wrapped = wrap(copy.deepcopy(model))
    result = Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=5).backward(own(batch, near_equal(40)))
    with torch.no_grad():
        loss = F.cross_entropy(model(batch[0]), batch[1])
    return {
        "error": error(wrapped, reference),
        "loss": abs(float(result.loss - loss)),
        "units": result.units,
        "micro_batches": result.micro_batches,
    }


def rank_without_rows(wrap: Wrap, *, gives_none: bool = True) -> dict[str, float]:
    model, batch = network(), labelled(7)
    size = dist.get_world_size()
    counts = [7 - (size - 2), *[1] * (size - 2), 0]
    reference = whole_batch_gradient(model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), batch)
    wrapped = wrap(copy.deepcopy(model))
    rows = own(batch, counts)
    if gives_none and not len(rows[0]):
        rows = None
    result = Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=2).backward(rows)
    return {"error": error(wrapped, reference), "units": result.units}


def empty_tensors(wrap: Wrap) -> dict[str, float]:
    return rank_without_rows(wrap, gives_none=False)


def rank_without_targets(wrap: Wrap) -> dict[str, float]:
    """A rank whose rows have no target that counts: its mean is nan."""
    model, batch = network(), ragged(12)
    counts = near_equal(12)
    batch[1][: counts[0]] = -100
    reference = whole_batch_gradient(model, tokens, batch)
    wrapped = wrap(copy.deepcopy(model))
    result = Accumulator(wrapped, TOKENS, micro_batch=2).backward(own(batch, counts))
    return {"error": error(wrapped, reference), "loss": abs(float(result.loss - tokens(model, batch).detach()))}


def class_weights(wrap: Wrap) -> dict[str, float]:
    model, batch = network(), labelled(23)
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 20.0]))
    reference = whole_batch_gradient(
        model,
        lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1], weight=torch.tensor([0.2, 1.0, 20.0]).double()),
        batch,
    )
    wrapped = wrap(copy.deepcopy(model))
    Accumulator(wrapped, supervised(criterion), micro_batch=4).backward(own(batch, near_equal(23)))
    return {"error": error(wrapped, reference)}


def sum_loss(wrap: Wrap) -> dict[str, float]:
    model, batch = network(), labelled(7)
    counts = [7, *[0] * (dist.get_world_size() - 1)] if dist.get_world_size() == 2 else near_equal(7)
    reference = whole_batch_gradient(
        model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1], reduction="sum"), batch
    )
    wrapped = wrap(copy.deepcopy(model))
    result = Accumulator(wrapped, supervised(nn.CrossEntropyLoss(reduction="sum")), micro_batch=3).backward(
        own(batch, counts)
    )
    with torch.no_grad():
        loss = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
    return {"error": error(wrapped, reference), "loss": abs(float(result.loss - loss))}


def adds_to_gradients(wrap: Wrap) -> dict[str, float]:
    model, batch = network(), labelled(22)
    reference = whole_batch_gradient(model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), batch)
    wrapped = wrap(copy.deepcopy(model))
    accumulator = Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=4)
    accumulator.backward(own(batch, near_equal(22)))
    accumulator.backward(own(batch, near_equal(22)))
    return {"error": error(wrapped, 2 * reference)}


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, LABELS)
        self.outside = nn.Parameter(torch.randn(5))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.second((self.first(inputs) * self.outside).tanh())
        return output


def inside_a_model(wrap: Wrap) -> dict[str, float]:
    """Two wrapped submodules, and a parameter that nobody wrapped."""
    torch.manual_seed(1)
    model, batch = TwoTowers(), labelled(17)
    reference = whole_batch_gradient(model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), batch)
    model.first, model.second = wrap(model.first), wrap(model.second)
    Accumulator(model, supervised(nn.CrossEntropyLoss()), micro_batch=3).backward(own(batch, near_equal(17)))
    return {"error": error(model, reference)}


def replicated_and_sharded() -> dict[str, float]:
    def wrap(model: nn.Module) -> nn.Module:
        shape = (2, dist.get_world_size() // 2)
        return fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))

    return uneven_rows(wrap) if dist.get_world_size() % 2 == 0 else uneven_rows(hsdp)


def keeps_parameters(wrap: Wrap) -> dict[str, float]:
    model, batch = network(), labelled(40)
    reference = whole_batch_gradient(model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), batch)
    wrapped = wrap(copy.deepcopy(model))
    accumulator = Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=5, reshard=False)
    accumulator.backward(own(batch, near_equal(40)))
    return {"error": error(wrapped, reference)}


SINGLE = (
    uneven_rows,
    rank_without_rows,
    empty_tensors,
    rank_without_targets,
    class_weights,
    sum_loss,
    adds_to_gradients,
)


@cases(
    *((2, scenario, wrap) for scenario in SINGLE for wrap in (ddp, fsdp)),
    *((3, scenario, wrap) for scenario in (uneven_rows, rank_without_rows) for wrap in (ddp, fsdp)),
    (2, adds_to_gradients, ddp_views),
    (2, inside_a_model, ddp),
    (2, inside_a_model, fully_shard),
    (2, replicated_and_sharded),
    (2, keeps_parameters, fsdp),
)
def test_the_gradient_is_that_of_the_whole_batch(size, scenario, arguments):
    """Over 3 ranks rows do not come out even: 40 are 14, 13, 13; 7 are 6, 1 and none."""
    assert largest(on_ranks(size, scenario, *arguments), "error") < 5e-7


@BOTH
def test_loss_and_units_are_those_of_the_whole_batch(wrap):
    for rank in on_ranks(2, uneven_rows, wrap):
        assert rank["loss"] < 1e-6
        assert rank["units"] == 40
    assert largest(on_ranks(2, rank_without_targets, wrap), "loss") < 1e-6
    assert largest(on_ranks(2, sum_loss, wrap), "loss") < 1e-5


def uneven_tokens(wrap: Wrap) -> dict[str, float]:
    model, batch = network(torch.float64), ragged(24)
    batch = (batch[0].double(), batch[1])
    reference = whole_batch_gradient(model, tokens, batch)
    wrapped = wrap(copy.deepcopy(model))
    rows = own(batch, near_equal(24))
    result = Accumulator(wrapped, TOKENS, micro_batch=1 + dist.get_rank()).backward(rows)
    exact = error(wrapped, reference)
    # the common mistake: each rank's own mean, averaged over ranks
    twin = wrap(copy.deepcopy(model))
    tokens(twin, rows).backward()
    return {
        "error": exact,
        "mean_of_means": error(twin, reference),
        "loss": abs(float(result.loss - tokens(model, batch).detach())),
        "units": result.units - float(num_targets(batch)),
    }


@cases((2, uneven_tokens, ddp), (2, uneven_tokens, fsdp), (3, uneven_tokens, ddp), (3, uneven_tokens, fsdp))
def test_uneven_tokens_and_numbers_of_micro_batches_are_exact_in_float64(size, scenario, arguments):
    told = on_ranks(size, scenario, *arguments)
    assert largest(told, "error") < 1e-12
    assert largest(told, "loss") < 1e-12
    assert largest(told, "units") == 0


@BOTH
def test_the_mean_over_ranks_of_their_means_is_not(wrap):
    assert min(rank["mean_of_means"] for rank in on_ranks(2, uneven_tokens, wrap)) > 0.1


def toggled_between_forward_and_backward() -> dict[str, float]:
    model, batch = network(), labelled(24)
    reference = whole_batch_gradient(model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), batch)
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    rows = own(batch, near_equal(24))
    parts = [take_rows(rows, list(range(len(rows[0])))[start::3]) for start in range(3)]
    for index, part in enumerate(parts):
        if index == 0:
            loss = F.cross_entropy(wrapped(part[0]), part[1]) / 3
            with wrapped.no_sync():
                loss.backward()
        elif index == 1:
            with wrapped.no_sync():
                (F.cross_entropy(wrapped(part[0]), part[1]) / 3).backward()
        else:
            with wrapped.no_sync():
                loss = F.cross_entropy(wrapped(part[0]), part[1]) / 3
            loss.backward()
    return {"error": error(wrapped, reference)}


def test_a_flag_toggled_between_forward_and_backward_is_not():
    assert min(rank["error"] for rank in on_ranks(2, toggled_between_forward_and_backward)) > 0.1


def no_targets_at_all(wrap: Wrap) -> dict[str, float]:
    model, batch = network(), ragged(12)
    batch[1][:] = -100
    wrapped = wrap(model)
    result = Accumulator(wrapped, TOKENS, micro_batch=2).backward(own(batch, near_equal(12)))
    return {"norm": float(whole(wrapped).norm()), "loss": float(result.loss), "units": result.units}


@BOTH
def test_a_batch_of_no_units_leaves_zero_gradients(wrap):
    for rank in on_ranks(2, no_targets_at_all, wrap):
        assert rank == {"norm": 0.0, "loss": 0.0, "units": 0.0}


def with_metrics(model: nn.Module, batch: Any) -> Any:
    outputs = model(batch[0])
    rows = F.cross_entropy(outputs, batch[1], reduction="none")
    hits = (outputs.argmax(1) == batch[1]).sum()
    return rows.mean(), {
        "error": 1 - hits / len(rows),
        "hits": Sum(hits),
        "first": Mean(batch[0][:, 0].mean(), len(rows)),
        "rows": PerRow(rows),
    }


def metrics(wrap: Wrap) -> dict[str, float]:
    model, batch = network(), labelled(11)
    counts = [5, 6] if dist.get_world_size() == 2 else [6, 5, *[0] * (dist.get_world_size() - 2)]
    rows = own(batch, counts)
    wrapped = wrap(model)
    result = Accumulator(wrapped, Objective(with_metrics), micro_batch=2).backward(rows if len(rows[0]) else None)
    wanted = with_metrics(model, batch)[1]
    return {
        "error": abs(float(result.metrics["error"] - wanted["error"])),
        "hits": float(result.metrics["hits"]) - float(wanted["hits"].value),
        "first": abs(float(result.metrics["first"] - wanted["first"].value)),
        "rows": float((result.metrics["rows"] - wanted["rows"].values).abs().max()),
    }


@cases((2, metrics, ddp), (2, metrics, fsdp), (3, metrics, ddp))
def test_metrics_are_those_of_the_whole_batch_and_rows_come_rank_by_rank(size, scenario, arguments):
    told = on_ranks(size, scenario, *arguments)
    for key in ("error", "hits", "first", "rows"):
        assert largest(told, key) < 1e-6


def bf16() -> dict[str, float]:
    """Summed in fp32 over micro-batches and ranks: as good as one process, far better than bf16 sums."""
    torch.manual_seed(5)
    model = nn.Linear(16, 4).bfloat16()
    inputs, targets = torch.randn(512, 16).bfloat16(), torch.randint(0, 4, (512,))
    reference = whole_batch_gradient(
        model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), (inputs, targets)
    )
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    accumulator = Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=1, keep_fp32=True)
    accumulator.backward(own((inputs, targets), near_equal(512)))
    found = {"error": error(wrapped, reference), "is_fp32": float(wrapped.module.weight.grad.dtype is torch.float32)}
    plain = DistributedDataParallel(copy.deepcopy(model))
    rows = own((inputs, targets), near_equal(512))
    for index in range(len(rows[0])):
        with plain.no_sync() if index + 1 < len(rows[0]) else torch.enable_grad():
            loss = F.cross_entropy(plain(rows[0][index : index + 1]).float(), rows[1][index : index + 1])
            (loss / len(rows[0])).backward()
    return {**found, "plain": error(plain, reference)}


def test_bf16_parameters_are_summed_in_fp32_over_micro_batches_and_ranks():
    told = on_ranks(2, bf16)
    assert largest(told, "error") < 3e-3
    assert all(rank["is_fp32"] for rank in told)


def test_bf16_sums_lose_a_digit():
    told = on_ranks(2, bf16)
    assert min(rank["plain"] for rank in told) > 3 * largest(told, "error")


def low_precision(reduce_dtype: torch.dtype | None) -> dict[str, float]:
    """Computed in bf16, summed in fp32."""
    model, batch = network(), labelled(64)
    reference = whole_batch_gradient(model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), batch)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    wrapped = fully_shard(copy.deepcopy(model), mp_policy=policy)
    Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=2).backward(own(batch, near_equal(64)))
    return {"error": error(wrapped, reference)}


def test_sharded_parameters_in_bf16_are_summed_in_fp32():
    assert largest(on_ranks(2, low_precision, torch.float32), "error") < 1e-2


def test_sums_in_bf16_are_refused_by_name_on_every_rank():
    for rank in raised_on_ranks(2, low_precision, None):
        assert rank.startswith("ParallelError: ")
        assert "reduce_dtype=torch.float32" in rank
