"""`prefetch`: the next micro-batch is on its way while one runs, on a stream of its own, and is waited for there."""

import pytest
import torch
from torch import Tensor

from anybatch import Update
from tests.accelerator.on_device import on_device
from tests.accelerator.plugged import Counted, counted, plug, queued
from tests.accelerator.setups import HOST, adamw, batch, contrastive, cross_entropy, mlp, off, trained


def pinned() -> tuple[Tensor, ...]:
    return tuple(column.pin_memory() for column in batch())


def after(rows: tuple[Tensor, ...], **options: object) -> tuple[torch.nn.Module, list[str], Counted]:
    """The model after three updates; the queues and the counts of the last of them."""
    model = mlp().to(plug())
    options = {"objective": cross_entropy(), "on_nonfinite": "ignore", **options}
    update = Update(model, adamw(model.parameters()), micro_batch=8, check="off", **options)
    for _ in range(3):
        before = counted()
        with queued() as log:
            update(rows)
    return model, log, counted() - before


def of_batch(log: list[str]) -> list[str]:
    """A "copy" or "forward" for each copy of inputs and each first layer, with its stream."""
    named = {"192 bytes": "copy", "168 bytes": "copy", "aten::addmm": "forward"}
    found = [f"{line.split()[0]} {name}" for line in log for end, name in named.items() if line.endswith(end)]
    return [line for number, line in enumerate(found) if "copy" in line or "forward" not in found[number - 1]]


@on_device
def test_the_next_is_sent_before_this_one_runs_on_a_stream_of_its_own():
    _, log, seen = after(pinned(), prefetch=True)
    order = of_batch(log)
    side = order[1].split()[0]
    # the last two forwards follow each other: both copies are on their way by then
    assert order == ["0 copy", *[f"{side} copy", "0 forward"] * 3], order
    assert side != "0"
    assert len([line for line in log if line == f"0 waits for stream {side}"]) == 3
    assert (seen.waits, seen.unsafe_frees) == (0, 0)


@on_device
def test_without_it_each_is_sent_when_its_turn_comes():
    _, log, _ = after(pinned())
    assert of_batch(log) == ["0 copy", "0 forward"] * 4, of_batch(log)


@pytest.mark.parametrize("objective", [cross_entropy, contrastive])
@on_device
def test_weights_are_those_of_the_host(objective):
    theirs, _, _ = trained(HOST, objective=objective)
    ours, _, seen = after(pinned(), objective=objective(), prefetch=True)
    assert off(ours, theirs) <= 5e-7
    assert (seen.waits, seen.unsafe_frees) == (0, 0)


@on_device
def test_memory_that_is_not_pinned_is_sent_as_ever():
    theirs, _, _ = trained(HOST)
    ours, log, _ = after(batch(), prefetch=True)
    assert off(ours, theirs) <= 5e-7
    assert not any("waits for stream" in line for line in log)
