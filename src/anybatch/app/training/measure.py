"""Record the timeline or the memory curve of one update."""

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

MOST_POINTS = 400  # of a memory curve
Result = TypeVar("Result")


@contextmanager
def observed(update: Update, observer: Observer) -> Iterator[None]:
    """Replace the update's observer inside the block."""
    before = update.observer
    update.observer = observer
    try:
        yield
    finally:
        update.observer = before


def with_timeline(update: Update, batch: Batch, number: int) -> tuple[UpdateResult, WindowSeen]:
    """Run an update and record when each stage ran, by the host's clock."""
    events: list[Event] = []
    begin = perf_counter()
    with observed(update, events.append):
        result = update(batch)
    retries = [place for place, event in enumerate(events) if isinstance(event, Retry)]
    if retries:  # attempts that ran out of memory do not count
        events = [event for event in events if isinstance(event, Zero)] + events[retries[-1] + 1 :]
    stages = tuple(
        StageTime(stage=event.stage, micro_batch=event.micro_batch, start=event.started - begin, seconds=event.seconds)
        for event in events
    )
    if result.dropped:  # shares have changed
        return result, WindowSeen(update=number, stages=stages)
    rows = {event.micro_batch: num_rows(event.batch) for event in events if isinstance(event, Load)}
    micro_batches = tuple(
        MicroBatchSeen(rows=rows[event.micro_batch], units=float(event.units), share=event.share)
        for event in events
        if isinstance(event, Loss) and event.micro_batch in rows
    )
    return result, WindowSeen(update=number, stages=stages, micro_batches=micro_batches)


def with_memory(update: Update, batch: Batch, number: int) -> tuple[UpdateResult, MemorySeen]:
    """Run an update and record the memory in use over time.

    On the CPU the profiler records every allocation, on top of weights and optimizer state. On an accelerator the
    allocator's counters are read after each stage.
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
    """Return the result of `action`, and the CPU memory after each allocation, on top of `standing` bytes."""
    seen = metered(action, names_ops=True)
    if not seen.allocations:
        return seen.result, []
    begin = min([seen.allocations[0][0], *(start for start, _ in seen.stages[:1])])
    points: list[MemoryPoint] = []
    in_use = standing
    for moment, nbytes in seen.allocations:
        in_use += nbytes
        # between two stages the one before counts, because its tensors are freed there
        num_begun = bisect.bisect_right(seen.stages, moment, key=lambda stage: stage[0])
        stage = seen.stages[max(num_begun - 1, 0)][1] if seen.stages else ""
        points.append(MemoryPoint(seconds=(moment - begin) / 1e9, bytes=in_use, stage=stage))
    return seen.result, points


def _by_counters(update: Update, batch: Batch, number: int, device: torch.device) -> tuple[UpdateResult, MemorySeen]:
    points: list[MemoryPoint] = []
    begin = perf_counter()

    def record(event: Event) -> None:
        torch.accelerator.synchronize(device)
        seconds = event.started + event.seconds - begin
        points.append(MemoryPoint(seconds=seconds, bytes=torch.accelerator.memory_allocated(device), stage=event.stage))

    with observed(update, record):
        result, peak = with_peak(lambda: update(batch), device)
    return result, MemorySeen(update=number, points=thin_out(points), peak_bytes=peak)


def thin_out(points: list[MemoryPoint]) -> tuple[MemoryPoint, ...]:
    """Keep at most `MOST_POINTS`, the highest of each run of neighbours, so that the peak stays."""
    size = max(-(-len(points) // MOST_POINTS), 1)
    groups = (points[start : start + size] for start in range(0, len(points), size))
    return tuple(max(group, key=lambda point: point.bytes) for group in groups)
