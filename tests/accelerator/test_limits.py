"""Memory that really runs out at the device's limit, what fits there, and plans beside the device's own peak."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn

from anybatch import Fit, Update, measure_peak, plan
from anybatch.core.snapshot import BatchState
from tests.accelerator.on_device import on_device
from tests.accelerator.plugged import limit, plug
from tests.accelerator.setups import HOST, adamw, batch, contrastive, cross_entropy, mlp, off, trained

ROWS = 512
WIDE = partial(mlp, nn.Linear(128, 128), nn.ReLU(), width=128)
DEEP = partial(mlp, *(layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.ReLU())), width=128)


def in_use() -> int:
    gc.collect()  # models of tests before
    return torch.accelerator.memory_allocated()


def num_ooms() -> int:
    return torch.accelerator.memory_stats()["num_ooms"]


def peak_of(rows: int, **options: object) -> int:
    """The most that updates of the whole batch in micro-batches of `rows` take, above what is there before the model."""
    before = in_use()
    torch.accelerator.reset_peak_memory_stats()
    trained(plug(), rows=ROWS, micro_batch=rows, **options)
    return torch.accelerator.max_memory_allocated() - before


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
    room = peak_of(64, **options) + 4096 + in_use()
    ooms = num_ooms()
    with limit(room):
        ours, result, _ = trained(plug(), rows=ROWS, micro_batch=512, **options)
    assert num_ooms() > ooms
    assert result.applied
    assert result.micro_batches >= 4
    assert off(ours, theirs) <= 5e-6, off(ours, theirs)


@pytest.mark.parametrize("is_put_back", [True, False])
@on_device
def test_what_the_attempt_that_failed_drew_is_drawn_again(is_put_back):
    """False is the twin: the random state stays where the attempts left it."""
    options = {
        "model": partial(mlp, nn.Dropout(0.3), nn.Linear(128, 128), nn.ReLU(), width=128),
        "optimizer": partial(torch.optim.SGD, lr=0.1),
    }
    expected, _, _ = trained(plug(), rows=ROWS, micro_batch=64, **options)
    room = peak_of(64, **options) + 4096 + in_use()
    put_back = BatchState.put_back
    BatchState.put_back = put_back if is_put_back else lambda self, before: ()
    try:
        with limit(room):
            ours, result, _ = trained(plug(), rows=ROWS, micro_batch=512, **options)
    finally:
        BatchState.put_back = put_back
    assert result.micro_batches == 8
    assert (off(ours, expected) == 0.0) is is_put_back


@pytest.mark.parametrize("model", ["wide", "deep"])
@on_device
def test_fit_uses_nine_tenths_of_the_device_and_never_runs_out(model):
    make = {"wide": WIDE, "deep": DEEP}[model]
    room = int(1.06 * peak_of(64, model=make))  # its margin of 5 %, and a little
    before, ooms = in_use(), num_ooms()
    with limit(before + room):
        torch.accelerator.reset_peak_memory_stats()
        with garbage_on_device(room // 2):
            _, result, update = trained(plug(), rows=ROWS, model=make, micro_batch=Fit())
        used = (torch.accelerator.max_memory_allocated() - before) / room
    assert (result.retries, num_ooms()) == (0, ooms)
    assert used >= 0.9, (used, update.accumulator.split.choice.describe())


@on_device
def test_what_the_host_comes_to_hold_takes_nothing_off_the_device():
    room = int(1.06 * peak_of(64, model=WIDE))
    _, _, update = trained(plug(), rows=ROWS, model=WIDE, micro_batch=Fit(room))
    held: list[bytearray] = []
    update.model.register_forward_hook(lambda *_: held.append(bytearray(2**20)))
    sizes = []
    for rows in (ROWS, ROWS + 1, ROWS, ROWS):
        update(batch(rows))
        sizes.append(update.accumulator.split.choice.size)
    assert sum(map(len, held)) > 4 * room
    assert max(sizes) - min(sizes) <= 1


@contextmanager
def garbage_on_device(size: int) -> Iterator[None]:
    """Memory that nobody can reach, and that is collected only by who asks for it: what a model before leaves behind."""
    held: list[object] = [torch.empty(size, dtype=torch.uint8, device=plug())]
    held.append(held)
    del held
    gc.disable()
    yield
    gc.enable()


@on_device
def test_auto_stays_below_the_limit():
    room = peak_of(96, model=WIDE) + in_use()
    ooms = num_ooms()
    with limit(room):
        _, result, _ = trained(plug(), rows=ROWS, updates=4, model=WIDE, micro_batch="auto")
    assert num_ooms() == ooms
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
