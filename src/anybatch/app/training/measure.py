"""Record one update while it runs: when each stage ran, and how much memory was in use."""

import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

import torch

from anybatch.app.records.schema import MemoryPoint, MemorySeen, MicroBatchSeen, StageTime, WindowSeen
from anybatch.core import (
    Batch,
    Event,
    Load,
    Loss,
    Observer,
    Retry,
    Update,
    UpdateResult,
    Zero,
    has_counters,
    num_rows,
    with_peak,
)
from anybatch.memory import bytes_of, drop_gradients, metered, standing_tensors

MOST_POINTS = 400  # a curve has no more; each is the highest of its neighbours, so the peak stays
Result = TypeVar("Result")


@contextmanager
def observed(update: Update, observer: Observer) -> Iterator[None]:
    """Inside this block `observer` alone is told the stages of the updates; afterwards the observer of before is."""
    before = update.observer
    update.observer = observer
    try:
        yield
    finally:
        update.observer = before


def with_timeline(update: Update, batch: Batch, number: int) -> tuple[UpdateResult, WindowSeen]:
    """Learn from `batch`, and say when each stage ran. Times are the host's."""
    events: list[Event] = []
    begin = perf_counter()
    with observed(update, events.append):
        result = update(batch)
    retries = [place for place, event in enumerate(events) if isinstance(event, Retry)]
    if retries:  # the attempts that did not fit do not count
        events = [event for event in events if isinstance(event, Zero)] + events[retries[-1] + 1 :]
    stages = tuple(
        StageTime(stage=event.stage, micro_batch=event.micro_batch, start=event.started - begin, seconds=event.seconds)
        for event in events
    )
    if result.dropped:
        return result, WindowSeen(update=number, stages=stages)
    rows = {event.micro_batch: num_rows(event.batch) for event in events if isinstance(event, Load)}
    micro_batches = tuple(
        MicroBatchSeen(rows=rows[event.micro_batch], units=float(event.units), share=event.share)
        for event in events
        if isinstance(event, Loss) and event.micro_batch in rows
    )
    return result, WindowSeen(update=number, stages=stages, micro_batches=micro_batches)


def with_memory(update: Update, batch: Batch, number: int) -> tuple[UpdateResult, MemorySeen]:
    """Learn from `batch`, and say how much memory was in use over the time of it.

    On the CPU by the profiler's record of every allocation, on top of the weights and the optimizer state that were there
    before; on an accelerator by the allocator's own counters, read after each stage. Gradients are dropped first, as the
    update does.
    """
    drop_gradients(update.parameters())
    device = update.parameters()[0].device
    if has_counters(device):
        return _by_counters(update, batch, number, device)
    standing = bytes_of(standing_tensors(update))
    result, points = profiled(lambda: update(batch), standing)
    peak = max((point.bytes for point in points), default=standing)
    return result, MemorySeen(update=number, points=thin_out(points), peak_bytes=peak)


def profiled(action: Callable[[], Result], standing: int) -> tuple[Result, list[MemoryPoint]]:
    """Result of `action`, and the memory of the CPU after each of its allocations, on top of `standing` bytes."""
    seen = metered(action, names_ops=True)
    if not seen.allocations:
        return seen.result, []
    begin = min([seen.allocations[0][0], *(start for start, _ in seen.stages[:1])])
    points: list[MemoryPoint] = []
    in_use = standing
    for moment, nbytes in seen.allocations:
        in_use += nbytes
        # the stage that was running; between two, the one before, because what it left is freed there
        num_begun = bisect.bisect_right(seen.stages, moment, key=lambda stage: stage[0])
        stage = seen.stages[max(num_begun - 1, 0)][1] if seen.stages else ""
        points.append(MemoryPoint(seconds=(moment - begin) / 1e9, bytes=in_use, stage=stage))
    return seen.result, points


def _by_counters(update: Update, batch: Batch, number: int, device: torch.device) -> tuple[UpdateResult, MemorySeen]:
    points: list[MemoryPoint] = []
    begin = perf_counter()

    def look(event: Event) -> None:
        torch.accelerator.synchronize(device)
        seconds = event.started + event.seconds - begin
        points.append(MemoryPoint(seconds=seconds, bytes=torch.accelerator.memory_allocated(device), stage=event.stage))

    with observed(update, look):
        result, peak = with_peak(lambda: update(batch), device)
    return result, MemorySeen(update=number, points=thin_out(points), peak_bytes=peak)


def thin_out(points: list[MemoryPoint]) -> tuple[MemoryPoint, ...]:
    """At most `MOST_POINTS` of these, the highest of each run of neighbours."""
    size = -(-len(points) // MOST_POINTS)
    if size <= 1:
        return tuple(points)
    groups = (points[start : start + size] for start in range(0, len(points), size))
    return tuple(max(group, key=lambda point: point.bytes) for group in groups)
