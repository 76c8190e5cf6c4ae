"""The real meter: every allocation of the CPU as the profiler saw it; on a GPU the allocator's own counters."""

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
    """Result of an action, and its allocations in order."""

    result: Result
    allocations: tuple[tuple[int, int], ...]
    """(nanoseconds, bytes): more than 0 was allocated, less was freed."""
    stages: tuple[tuple[int, str], ...]
    """(nanoseconds, name) of the beginning of each stage of the updates inside; none where ops have no names."""

    def peak(self, standing: int) -> int:
        """The most in use at any moment, on top of `standing` bytes that were there before."""
        return max(accumulate((nbytes for _, nbytes in self.allocations), initial=standing))


def metered(action: Callable[[], Result], device_type: str = "cpu", *, names_ops: bool = False) -> Metered[Result]:
    """Run `action` under the profiler. Byte-true and deterministic on the CPU, where resident memory is not.

    Only this thread's allocations and those of the backward passes it starts are seen, and on the CPU only those by torch's
    allocator: buffers that kernels allocate for themselves are not. Names of ops tell of stages; they may take more memory than
    the action does, and some 1,200 bytes per allocation are taken without.
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
    """Learn from `batch`, and say what the most memory in use was: weights, optimizer, gradients, activations and the batch.

    On an accelerator the allocator's counter is read, which knows of everything that this process holds there.
    """
    device = update.parameters()[0].device
    drop_gradients(update.parameters())
    if has_counters(device):
        return with_peak(lambda: update(batch), device)
    held = bytes_of([*standing_tensors(update), *tensors(batch)])
    seen = metered(lambda: update(batch))
    return seen.result, seen.peak(held)


def standing_tensors(update: Update) -> list[Tensor]:
    """List what lives from update to update: parameters, buffers, the optimizer's state."""
    return [*update.parameters(), *update.model.buffers(), *optimizer_tensors(update.optimizer)]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Count the bytes that these tensors hold together, in this process; views of one storage count once."""
    held = [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]
    return sum({storage_cdata(one.untyped_storage()): one.untyped_storage().nbytes() for one in held}.values())


def optimizer_tensors(optimizer: Optimizer | None) -> Iterator[Tensor]:
    """Yield the optimizer's state: moments, momentum buffers; nothing without an optimizer."""
    for state in () if optimizer is None else optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Free all gradients: the profiler would not see the end of what was there before it."""
    for parameter in parameters:
        parameter.grad = None
