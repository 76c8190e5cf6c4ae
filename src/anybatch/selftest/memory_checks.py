"""Memory that runs out, what fits, and a plan beside the real peak: on an accelerator by filling it until little is left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from anybatch.device_memory import free_on_device, has_counters
from anybatch.memory import Fit, measure_peak, plan
from anybatch.selftest.checked import Checked
from anybatch.selftest.exactness_checks import counted_targets, mlp, some_rows
from anybatch.sizes import show_bytes
from anybatch.state import free_memory
from anybatch.update import Update

WIDTH = 512
MOST_OFF = 1e-5
"""Of weights after an update that started again: the same sums in another order."""
SLACK = 1.06
"""What is left free, out of the peak of what is to fit: its margin, and a little."""
PARTS = 16
"""Micro-batches are near equal in size, so few of them could leave much of the memory unused."""
_LAYER: tuple[Callable[[], nn.Module], ...] = (partial(nn.Linear, WIDTH, WIDTH), nn.ReLU)
_deep = partial(mlp, *_LAYER * 4, width=WIDTH)


def updating(device: torch.device, micro_batch: int | Fit) -> Update:
    """An update of a model of six layers, made there."""
    model = _deep().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    return Update(model, optimizer, counted_targets(device), micro_batch=micro_batch, check="off")


@dataclass(frozen=True, slots=True)
class FittingRun:
    """An update in micro-batches that fit, as it is when memory does not run out."""

    weights: list[Tensor]
    peak: int
    """The most that a second update had in use, model and optimizer included."""


def memory_checks(device: torch.device, num_rows: int) -> Iterator[Checked]:
    """Of batches of `num_rows`, of which a sixteenth fits; on the CPU, memory that runs out is pretended."""
    measured = _in_parts(device, num_rows)
    yield _planned(device, num_rows, measured)
    yield _starts_again(device, num_rows, measured)
    yield _fits(device, num_rows, measured)


def _in_parts(device: torch.device, num_rows: int) -> FittingRun:
    before = _taken(device)
    update = updating(device, num_rows // PARTS)
    update(some_rows(num_rows))
    weights = [parameter.detach().clone().cpu() for parameter in update.parameters()]
    _, peak = measure_peak(update, some_rows(num_rows))
    return FittingRun(weights, peak - before)


def _planned(device: torch.device, num_rows: int, measured: FittingRun) -> Checked:
    update = updating(device, num_rows // PARTS)
    update(some_rows(num_rows))
    found = plan(update.model, update.optimizer, counted_targets(device), some_rows(num_rows), memory="1TiB")
    predicted = found.peak(num_rows // PARTS)
    off = predicted / measured.peak - 1
    return Checked(
        group="memory",
        name="a plan, beside the real peak",
        found=f"{show_bytes(predicted)} and {show_bytes(measured.peak)}: {off:+.1%}",
        wanted="within 5 %",
        has_passed=abs(off) <= 0.05,
    )


def _starts_again(device: torch.device, num_rows: int, measured: FittingRun) -> Checked:
    free_memory()
    with _filled(device, int(measured.peak * SLACK)):
        update = updating(device, num_rows)
        if not has_counters(device):
            update.model.register_forward_pre_hook(partial(_refuse, num_rows // PARTS))
        result = update(some_rows(num_rows))
    pairs = zip(update.parameters(), measured.weights, strict=True)
    error = max(float((one.detach().cpu() - other).abs().max()) for one, other in pairs)
    return Checked(
        group="memory",
        name="memory runs out, the batch starts again" + ("" if has_counters(device) else " (pretended)"),
        found=f"{result.retries} restarts, {result.micro_batches} micro-batches, weights off by {error:.0e}",
        wanted=f"restarts, at most {MOST_OFF:.0e}",
        has_passed=result.retries > 0 and error <= MOST_OFF,
    )


def _fits(device: torch.device, num_rows: int, measured: FittingRun) -> Checked:
    free_memory()
    before, room = _taken(device), int(measured.peak * SLACK)
    with _filled(device, room) as filling:
        update = updating(device, Fit() if has_counters(device) else Fit(room))
        retries = update(some_rows(num_rows)).retries
        result, peak = measure_peak(update, some_rows(num_rows))
        used = (peak - before - filling) / room
    return Checked(
        group="memory",
        name="Fit, into what is left",
        found=f"{used:.0%} used, {retries + result.retries} restarts",
        wanted="90 % or more, no restart",
        has_passed=used >= 0.9 and retries + result.retries == 0,
    )


def _taken(device: torch.device) -> int:
    return torch.accelerator.memory_allocated(device) if has_counters(device) else 0


@contextmanager
def _filled(device: torch.device, room: int) -> Iterator[int]:
    """Inside this block `room` bytes are free there; the bytes that fill the rest. The CPU is left alone."""
    size = free_on_device(device) - room if has_counters(device) else 0
    filling = torch.empty(max(size, 0), dtype=torch.uint8, device=device)
    try:
        yield filling.nbytes
    finally:
        del filling


def _refuse(at_most: int, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    if len(inputs[0]) > at_most:
        raise torch.OutOfMemoryError(f"pretended: {len(inputs[0])} rows, of which {at_most} fit")
