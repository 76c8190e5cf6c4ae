"""Measure memory: by the profiler on the CPU, by the allocator's counters on an accelerator."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from anybatch.core import (
    Batch,
    Update,
    UpdateResult,
    has_counters,
    is_sharded,
    profiler_events,
    storage_cdata,
    tensors,
    with_peak,
    without_op_names,
)

_PREFIX = "anybatch."
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Metered(Generic[Result]):
    """Result of an action and its allocations in order."""

    result: Result
    allocations: tuple[tuple[int, int], ...]  # (nanoseconds, bytes); negative bytes were freed
    stages: tuple[tuple[int, str], ...]
    """(nanoseconds, name) of the start of each stage of an update; empty without names of ops."""

    def peak(self, standing: int) -> int:
        """Return the most bytes in use at any moment, on top of `standing` bytes from before."""
        return max(accumulate((nbytes for _, nbytes in self.allocations), initial=standing))


def metered(action: Callable[[], Result], device_type: str = "cpu", *, names_ops: bool = False) -> Metered[Result]:
    """Run `action` under the profiler. Exact to the byte and deterministic on the CPU, unlike resident memory.

    Records the allocations of torch's allocator by this thread and its backward passes; buffers that CPU kernels allocate
    themselves are not seen. The profiler itself takes about 1,200 bytes per allocation, and more with names of ops, which
    `stages` needs.
    """
    named: AbstractContextManager[None] = nullcontext() if names_ops else without_op_names()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device_type == "cuda" else [])
    with profile(activities=activities, profile_memory=True) as profiler, named:
        result = action()
    stages, allocations = [], []
    for event in profiler_events(profiler):
        if event.name().startswith(_PREFIX):
            stages.append((event.start_ns(), event.name().removeprefix(_PREFIX)))
        elif event.name() == "[memory]" and event.device_type().name.lower() == device_type:
            allocations.append((event.start_ns(), event.nbytes()))
    allocations.sort(key=lambda allocation: allocation[0])
    return Metered(result, tuple(allocations), tuple(sorted(stages)))


def measure_peak(update: Update, batch: Batch) -> tuple[UpdateResult, int]:
    """Run one update and measure its peak memory.

    The peak counts weights, optimizer state, gradients, activations and the batch. On an accelerator it is the allocator's
    counter, which counts everything that this process holds there.

    Args:
        update: The update to run; its model learns from the batch.
        batch: A batch, as for `Update`.

    Returns:
        The result of the update, and the peak in bytes.
    """
    device = update.parameters()[0].device
    drop_gradients(update.parameters())
    if has_counters(device):
        return with_peak(lambda: update(batch), device)
    held = bytes_of([*standing_tensors(update), *tensors(batch)])
    seen = metered(lambda: update(batch))
    return seen.result, seen.peak(held)


def standing_tensors(update: Update) -> list[Tensor]:
    """List the tensors that live between updates: parameters, buffers, optimizer state."""
    return [*update.parameters(), *update.model.buffers(), *optimizer_tensors(update.optimizer)]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Sum the bytes of these tensors in this process; views of one storage count once."""
    held = [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]
    return sum({storage_cdata(one.untyped_storage()): one.untyped_storage().nbytes() for one in held}.values())


def optimizer_tensors(optimizer: Optimizer | None) -> Iterator[Tensor]:
    for state in () if optimizer is None else optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Free all gradients. The profiler would not see that memory from before it is freed."""
    for parameter in parameters:
        parameter.grad = None
