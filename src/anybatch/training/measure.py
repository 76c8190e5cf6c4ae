"""Looking at one update while it runs: when each stage ran, and how much memory was in use."""

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from anybatch.batches import Batch
from anybatch.parallel import is_sharded
from anybatch.stages import Event, Observer
from anybatch.training.records import MemoryPoint, MemorySeen, StageTime, WindowSeen
from anybatch.update import Update, UpdateResult

MOST_POINTS = 400
"""A curve has no more points than this; each stands for the highest of its neighbours, so the peak stays."""
_PREFIX = "anybatch."
Result = TypeVar("Result")


@contextmanager
def observed(update: Update, observer: Observer) -> Iterator[None]:
    """Tell `observer` the stages of the updates inside this block, and nobody else afterwards."""
    before = update.observer, update.accumulator.observer
    update.observer = update.accumulator.observer = observer
    try:
        yield
    finally:
        update.observer, update.accumulator.observer = before


def with_timeline(update: Update, batch: Batch, number: int) -> tuple[UpdateResult, WindowSeen]:
    """Learn from `batch`, and say when each stage ran. Times are the host's."""
    events: list[Event] = []
    begin = perf_counter()
    with observed(update, events.append):
        result = update(batch)
    stages = tuple(
        StageTime(stage=event.stage, micro_batch=event.micro_batch, start=event.started - begin, seconds=event.seconds)
        for event in events
    )
    return result, WindowSeen(update=number, stages=stages)


def with_memory(update: Update, batch: Batch, number: int) -> tuple[UpdateResult, MemorySeen]:
    """Learn from `batch`, and say how much memory was in use over the time of it.

    On the CPU by the profiler's record of every allocation, on top of the weights and the optimizer state that were there
    before; on a GPU by the allocator's own counters, read after each stage. Gradients are dropped first, as the update does.
    """
    drop_gradients(update.parameters())
    if update.parameters()[0].device.type == "cuda":
        return _on_cuda(update, batch, number)
    standing = bytes_of([*update.parameters(), *update.model.buffers(), *optimizer_tensors(update.optimizer)])
    result, points = profiled(lambda: update(batch), standing)
    peak = max((point.bytes for point in points), default=standing)
    return result, MemorySeen(update=number, points=thin_out(points), peak_bytes=peak)


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Free all gradients: the profiler would not see the end of what was there before it."""
    for parameter in parameters:
        parameter.grad = None


def profiled(action: Callable[[], Result], standing: int) -> tuple[Result, list[MemoryPoint]]:
    """What `action` returns, and the memory of the CPU after each of its allocations, on top of `standing` bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        result = action()
    events = profiler.profiler.kineto_results.events()
    stages = sorted(
        (event.start_ns(), event.name().removeprefix(_PREFIX)) for event in events if event.name().startswith(_PREFIX)
    )
    allocations = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    if not allocations:
        return result, []
    begin = min([allocations[0][0], *(start for start, _ in stages[:1])])
    in_use = itertools.accumulate((nbytes for _, nbytes in allocations), initial=standing)
    next(in_use)
    points = [
        MemoryPoint(seconds=(moment - begin) / 1e9, bytes=total, stage=_stage_at(moment, stages))
        for (moment, _), total in zip(allocations, in_use, strict=True)
    ]
    return result, points


def _on_cuda(update: Update, batch: Batch, number: int) -> tuple[UpdateResult, MemorySeen]:
    points: list[MemoryPoint] = []
    begin = perf_counter()

    def look(event: Event) -> None:
        torch.cuda.synchronize()
        seconds = event.started + event.seconds - begin
        points.append(MemoryPoint(seconds=seconds, bytes=torch.cuda.memory_allocated(), stage=event.stage))

    torch.cuda.reset_peak_memory_stats()
    with observed(update, look):
        result = update(batch)
    peak = torch.cuda.max_memory_allocated()
    return result, MemorySeen(update=number, points=thin_out(points), peak_bytes=peak)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The memory that these tensors hold together, in this process; views of one storage count once."""
    held = [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    return sum(storages.values())


def optimizer_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    """The optimizer's state: moments, momentum buffers."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _stage_at(moment: int, stages: list[tuple[int, str]]) -> str:
    """The stage that was running; between two, the one before, because what it left is freed there."""
    before = bisect.bisect_right(stages, moment, key=lambda stage: stage[0])
    return stages[max(before - 1, 0)][1] if stages else ""


def thin_out(points: list[MemoryPoint]) -> tuple[MemoryPoint, ...]:
    """At most `MOST_POINTS` of these, the highest of each run of neighbours."""
    size = -(-len(points) // MOST_POINTS)
    if size <= 1:
        return tuple(points)
    groups = (points[start : start + size] for start in range(0, len(points), size))
    return tuple(max(group, key=lambda point: point.bytes) for group in groups)
