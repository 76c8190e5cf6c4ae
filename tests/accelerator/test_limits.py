"""Memory that really runs out at the device's limit, what fits there, and plans beside the device's own peak."""

from functools import partial

import pytest
import torch
from torch import nn

from anybatch import Fit, Update, measure_peak, plan
from tests.accelerator.on_device import on_device
from tests.accelerator.plugged import limit, plug
from tests.accelerator.setups import HOST, adamw, batch, contrastive, cross_entropy, mlp, off, trained

ROWS = 512
WIDE = partial(mlp, nn.Linear(128, 128), nn.ReLU(), width=128)
DEEP = partial(mlp, *(layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.ReLU())), width=128)


def in_use() -> int:
    return torch.accelerator.memory_allocated()


def peak_of(rows: int, **options: object) -> int:
    """The most that updates of the whole batch in micro-batches of `rows` take, above what is there before the model."""
    before = in_use()
    torch.accelerator.reset_peak_memory_stats()
    made = trained(plug(), rows=ROWS, micro_batch=rows, **options)
    peak = torch.accelerator.max_memory_allocated() - before
    del made
    return peak


CASES = {
    "plain": {"model": WIDE},
    "batch norm": {"model": partial(mlp, nn.BatchNorm1d(128), width=128), "batch_norm": "micro"},
    "coupled": {"model": WIDE, "objective": contrastive},
    "scaler": {"model": WIDE, "scaler": True},
}


@pytest.mark.parametrize("name", CASES)
@on_device
def test_a_batch_that_does_not_fit_starts_again_smaller_and_learns_the_same(name):
    options = CASES[name]
    theirs, _, _ = trained(HOST, rows=ROWS, micro_batch=64, **options)
    room = in_use() + peak_of(64, **options) + 4096
    with limit(room):
        ours, result, update = trained(plug(), rows=ROWS, micro_batch=512, **options)
        assert torch.accelerator.memory_stats()["num_ooms"] > 0
    assert result.applied
    assert result.micro_batches >= 4
    assert off(ours, theirs) <= 5e-6, off(ours, theirs)
    del ours, update


@on_device
def test_a_batch_that_is_started_again_with_what_it_left_behind_is_not_the_same():
    """The twin: gradients of the attempt that failed stay in `.grad`."""
    from anybatch.gradients import GradientSum

    options = CASES["plain"]
    theirs, _, _ = trained(HOST, rows=ROWS, micro_batch=64, **options)
    room = in_use() + peak_of(64, **options) + 4096
    whole = GradientSum.__exit__
    GradientSum.__exit__ = lambda self, *error: None
    try:
        with limit(room):
            ours, _, _ = trained(plug(), rows=ROWS, micro_batch=384, **options)
    finally:
        GradientSum.__exit__ = whole
    assert off(ours, theirs) > 1e-4


@pytest.mark.parametrize("model", ["wide", "deep"])
@on_device
def test_fit_uses_nine_tenths_of_the_device_and_never_runs_out(model):
    make = {"wide": WIDE, "deep": DEEP}[model]
    room = in_use() + int(1.06 * peak_of(32, model=make))  # its margin of 5 %, and a little
    ooms = torch.accelerator.memory_stats()["num_ooms"]
    with limit(room):
        torch.accelerator.reset_peak_memory_stats()
        _, result, update = trained(plug(), rows=ROWS, model=make, micro_batch=Fit())
        used = torch.accelerator.max_memory_allocated() / room
    assert result.retries == 0
    assert torch.accelerator.memory_stats()["num_ooms"] == ooms
    assert used >= 0.9, (used, update.accumulator.split.choice.describe())


@on_device
def test_auto_stays_below_the_limit():
    room = in_use() + peak_of(96, model=WIDE)
    ooms = torch.accelerator.memory_stats()["num_ooms"]
    with limit(room):
        _, result, _ = trained(plug(), rows=ROWS, updates=4, model=WIDE, micro_batch="auto")
    assert torch.accelerator.memory_stats()["num_ooms"] == ooms
    assert result.applied


@pytest.mark.parametrize("rows", [64, 512])
@pytest.mark.parametrize("model", ["wide", "deep", "batch norm", "convolutions"])
@on_device
def test_a_plan_is_the_devices_own_peak(model, rows):
    def convolutions() -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3))

    make = {
        "wide": WIDE,
        "deep": DEEP,
        "batch norm": partial(mlp, nn.BatchNorm1d(128), width=128),
        "convolutions": convolutions,
    }[model]
    before = in_use()
    there = make().to(plug())
    optimizer = adamw(there.parameters())
    found = plan(there, optimizer, cross_entropy(), batch(ROWS), memory="1GiB", batch_norm="micro", checkpointing=False)
    update = Update(there, optimizer, cross_entropy(), micro_batch=rows, batch_norm="micro", check="off")
    update(batch(ROWS))
    update(batch(ROWS))
    _, peak = measure_peak(update, batch(ROWS))
    expected = found.whole_bytes if rows == ROWS else found.peak(rows)
    assert expected == pytest.approx(peak - before, rel=0.02), (expected, peak - before, found.method)
