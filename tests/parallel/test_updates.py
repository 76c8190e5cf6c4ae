"""Updates over ranks: clipped, scaled, skipped, dropped and failed as one process has them."""

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from anybatch import Accumulator, Objective, Update, supervised
from anybatch.core import take_rows
from tests.parallel.wrapped import (
    BOTH,
    TOKENS,
    Wrap,
    ddp,
    difference,
    error,
    fsdp,
    labelled,
    largest,
    near_equal,
    network,
    own,
    ragged,
)
from tests.processes.ranks import on_ranks, raised_on_ranks
from tests.reference import whole_batch_gradient


def trained(model: nn.Module, batches: list[Any], *, micro_batch: int = 3, **options: Any) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    update = Update(model, optimizer, TOKENS, micro_batch=micro_batch, **options)
    return [update(batch) for batch in batches]


def token_batches(dtype: torch.dtype) -> list[Any]:
    batches = []
    for number in range(4):
        torch.manual_seed(10 + number)
        count = [13, 9, 16, 5][number]
        inputs, targets = ragged(count)
        batches.append(((inputs + number).to(dtype), targets))
    return batches


def updates_with_clipping(wrap: Wrap) -> dict[str, float]:
    """Four updates, clipped: weights and reported numbers as in one process."""
    alone = network(torch.float64)
    wanted = trained(alone, token_batches(torch.float64), clip_norm=0.1)
    wrapped = wrap(network(torch.float64))
    batches = [own(batch, near_equal(len(batch[0]))) for batch in token_batches(torch.float64)]
    got = trained(wrapped, batches, clip_norm=0.1)
    return {
        "weights": difference(wrapped, alone),
        "norms": max(abs(float(a.grad_norm - b.grad_norm)) for a, b in zip(wanted, got, strict=True)),
        "losses": max(abs(float(a.loss - b.loss)) for a, b in zip(wanted, got, strict=True)),
        "clipped": float(min(result.grad_norm for result in got)) > 0.1,
    }


@BOTH
def test_updates_with_clipping_are_those_of_one_process(wrap):
    told = on_ranks(2, updates_with_clipping, wrap)
    for key in ("weights", "norms", "losses"):
        assert largest(told, key) < 1e-12
    assert all(rank["clipped"] for rank in told)


def value_clipping_and_scaling(wrap: Wrap) -> dict[str, float]:
    """A scaler, and clipping by value: as one process has it."""
    found = {}
    for name, options in {"clip_value": {"clip_value": 1e-3}, "scaler": {"clip_norm": 0.1}}.items():
        models = network(torch.float64), wrap(network(torch.float64))
        for model in models:
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12) if name == "scaler" else None
            batches = token_batches(torch.float64)
            if model is models[1]:
                batches = [own(batch, near_equal(len(batch[0]))) for batch in batches]
            trained(model, batches, scaler=scaler, **options)
        found[name] = difference(models[1], models[0])
    return found


@BOTH
def test_clipping_by_value_and_a_scaler_are_those_of_one_process(wrap):
    told = on_ranks(2, value_clipping_and_scaling, wrap)
    for key in ("clip_value", "scaler"):
        assert largest(told, key) < 1e-12


def spoilt() -> tuple[Tensor, Tensor]:
    """16 rows; the third of the last rank's own is inf."""
    inputs, targets = labelled(16)
    counts = near_equal(16)
    inputs[sum(counts[:-1]) + 2] = torch.inf
    return inputs, targets


def overflow(wrap: Wrap) -> dict[str, Any]:
    """One rank's rows overflow: no rank steps, and every rank's scale is halved."""
    model = wrap(network())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = Update(model, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=3, scaler=scaler)
    result = update(own(spoilt(), near_equal(16)))
    return {"applied": result.applied, "scale": scaler.get_scale(), "weights": difference(model, network())}


@BOTH
def test_a_rank_that_overflows_holds_every_ranks_step_and_halves_every_scale(wrap):
    for rank in on_ranks(2, overflow, wrap):
        assert rank == {"applied": False, "scale": 2048.0, "weights": 0.0}


def overflow_of_a_shard() -> dict[str, Any]:
    """The gradient of the first output alone overflows: rank 0 holds it."""
    model = fully_shard(nn.Linear(6, 4 * dist.get_world_size()))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    objective = Objective(lambda twin, rows: twin(rows[0]).mean() + (twin(rows[0])[:, 0] * 1e37).mean())
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), objective, micro_batch=3, scaler=scaler)
    result = update(own(labelled(16), near_equal(16)))
    return {"applied": result.applied, "scale": scaler.get_scale()}


def test_an_overflow_in_one_ranks_shard_is_everybodys():
    for rank in on_ranks(2, overflow_of_a_shard):
        assert rank == {"applied": False, "scale": 2048.0}


def nonfinite(wrap: Wrap, decision: str) -> dict[str, Any]:
    model = wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = Update(model, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=2, on_nonfinite=decision)
    result = update(own(spoilt(), near_equal(16)))
    again = update(own(labelled(16), near_equal(16)))
    return {
        "applied": result.applied,
        "weights": difference(model, network()),
        "units": result.units,
        "dropped": result.dropped,
        "again": again.applied,
    }


@BOTH
def test_a_gradient_that_is_not_finite_is_raised_everywhere_and_names_the_rank(wrap):
    for rank in raised_on_ranks(2, nonfinite, wrap, "raise"):
        assert rank.startswith("NonFiniteError")
        assert "first in micro-batch 1 of 4 of rank 1" in rank


@BOTH
def test_an_update_is_skipped_by_all_ranks_and_the_next_one_applied(wrap):
    for rank in on_ranks(2, nonfinite, wrap, "skip"):
        assert not rank["applied"]
        assert rank["again"]
        assert rank["units"] == 16


def test_a_sharded_model_drops_no_micro_batches_and_says_so():
    for rank in raised_on_ranks(2, nonfinite, fsdp, "drop"):
        assert rank.startswith("ParallelError: ")
        assert "on_nonfinite='skip'" in rank


def drop(wrap: Wrap) -> dict[str, float]:
    """The micro-batch that is left out is one of the last rank's, and the rest is renormalised over all ranks."""
    model, counts = network(), near_equal(16)
    left_out = sum(counts[:-1]) + 2
    kept = [row for row in range(16) if row not in (left_out, left_out + 1)]
    reference = whole_batch_gradient(
        model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), take_rows(labelled(16), kept)
    )
    wrapped = wrap(copy.deepcopy(model))
    objective = supervised(nn.CrossEntropyLoss())
    result = Accumulator(wrapped, objective, micro_batch=2, drop_nonfinite=True).backward(own(spoilt(), counts))
    numbers = [-(-count // 2) for count in counts]
    return {
        "error": error(wrapped, reference),
        "units": result.units - 14,
        "dropped": float(result.dropped != (sum(numbers[:-1]) + 1,)),
    }


def test_a_dropped_micro_batch_is_numbered_over_all_ranks_and_the_rest_is_renormalised():
    told = on_ranks(2, drop, ddp)
    assert largest(told, "error") < 5e-7
    assert largest(told, "units") == 0
    assert largest(told, "dropped") == 0


def test_over_three_ranks_the_rest_is_renormalised_too():
    assert largest(on_ranks(3, drop, ddp), "error") < 5e-7


def error_in_a_forward(wrap: Wrap) -> dict[str, float]:
    """All ranks fail in their second micro-batch; what was there stays, and the next batch is exact."""
    model, batch = network(), labelled(24)
    reference = whole_batch_gradient(model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), batch)
    wrapped = wrap(copy.deepcopy(model))
    calls = [0]

    def failing(twin: nn.Module, rows: Any) -> Tensor:
        calls[0] += 1
        if calls[0] == 2:
            raise ValueError("second micro-batch")
        return F.cross_entropy(twin(rows[0]), rows[1])

    accumulator = Accumulator(wrapped, Objective(failing), micro_batch=3)
    rows = own(batch, near_equal(24))
    with contextlib.suppress(ValueError):
        accumulator.backward(rows)
    left = sum(parameter.grad is not None for parameter in wrapped.parameters())
    accumulator.backward(rows)
    return {"left": left, "error": error(wrapped, reference)}


@BOTH
def test_an_error_in_a_forward_leaves_gradients_as_they_were_and_the_next_batch_is_exact(wrap):
    told = on_ranks(2, error_in_a_forward, wrap)
    assert largest(told, "left") == 0
    assert largest(told, "error") < 5e-7


def error_in_units(wrap: Wrap) -> float:
    def units(batch: Any) -> float:
        return -1 if dist.get_rank() == 1 else len(batch[0])

    objective = Objective(lambda model, rows: F.cross_entropy(model(rows[0]), rows[1]), units)
    Accumulator(wrap(network()), objective, micro_batch=2).backward(own(labelled(8), near_equal(8)))
    return 0.0


@BOTH
def test_an_error_before_the_first_forward_is_everybodys(wrap):
    for rank, text in enumerate(raised_on_ranks(2, error_in_units, wrap)):
        assert text.startswith("UnitsError" if rank == 1 else "ParallelError: rank 1 failed before its first forward")


def error_of_one_rank() -> float:
    """One rank alone fails in its second forward."""
    calls = [0]

    def loss(model: nn.Module, rows: Any) -> Tensor:
        calls[0] += 1
        if dist.get_rank() == 1 and calls[0] == 2:
            raise ValueError("only here")
        return F.cross_entropy(model(rows[0]), rows[1])

    Accumulator(DistributedDataParallel(network()), Objective(loss), micro_batch=2).backward(
        own(labelled(20), near_equal(20))
    )
    return 0.0


def test_an_error_of_one_rank_does_not_leave_the_others_waiting():
    others, failed = raised_on_ranks(2, error_of_one_rank)
    assert others.startswith("ParallelError: rank 1 failed while it ran its micro-batches")
    assert failed == "ValueError: only here"
