"""Meters: times of several contenders interleaved in one run, and the peak of live tensor memory."""

import gc
import statistics
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

Contender = Callable[[], float | None]
"""Does the work once; returns the seconds it measured itself, or None to be timed from outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One contender's time per batch, and its ratio to the first contender round by round."""

    seconds: float
    ratio: float
    spread: tuple[float, float]
    """The quartiles of the ratio: how noisy the machine was."""


def interleave(
    contenders: Mapping[str, Contender], *, rounds: int, repeats: int, clock: Callable[[], float] = perf_counter
) -> dict[str, Timing]:
    """Run all contenders in turn, `rounds` times, `repeats` batches each; ratios are taken within a round, then the median.

    With `clock=process_time` it is the processor's time in all threads that counts, which neighbours on a busy machine touch
    less than they touch the clock on the wall; waiting for a disk is not in it.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for contender in contenders.values():
        contender()
    for _ in range(rounds):
        gc.collect()
        for name, contender in contenders.items():
            seconds[name].append(_per_batch(contender, repeats, clock))
    base = next(iter(seconds.values()))
    return {name: _timing(measured, base) for name, measured in seconds.items()}


def peak_bytes(work: Callable[[], object], held: Iterable[Tensor]) -> int:
    """The most tensor memory alive at any moment of `work`, counting the tensors `held` before it.

    Read off the profiler's allocation events: byte-true on the CPU, where resident memory is not.
    """
    held_bytes = sum(tensor.untyped_storage().nbytes() for tensor in held)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = held_bytes
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def _per_batch(contender: Contender, repeats: int, clock: Callable[[], float]) -> float:
    start = clock()
    own = [contender() for _ in range(repeats)]
    outside = (clock() - start) / repeats
    return outside if own[0] is None else statistics.mean(seconds for seconds in own if seconds is not None)


def _timing(measured: list[float], base: list[float]) -> Timing:
    ratios = [mine / theirs for mine, theirs in zip(measured, base, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return Timing(seconds=statistics.median(measured), ratio=statistics.median(ratios), spread=(low, high))


class LiveBytes(TorchDispatchMode):
    """Inside this block `peak` is the most tensor memory alive at any moment, whichever thread allocated it.

    The profiler sees its own thread only, and a lockstep forward has a thread per micro-batch. Here every storage that an
    operation returns is followed by a weak reference until it dies. Threads that anybatch starts take the mode along; what a
    kernel allocates and frees inside is not seen, in any contender.
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._lock = threading.RLock()
        self.live = self.peak = 0
        for tensor in held:
            self._follow(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in _tensors(output):
            self._follow(tensor)
        return output

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        with self._lock:
            known = self._alive.get(key)
            if known is not None and known[0]() is storage:
                self.live += size - known[1]  # resized
            else:
                self.live += size
            reference = weakref.ref(storage, lambda _, key=key: self._died(key)) if known is None else known[0]
            self._alive[key] = reference, size
            self.peak = max(self.peak, self.live)

    def _died(self, key: int) -> None:
        with self._lock:
            self.live -= self._alive.pop(key)[1]


def peak_bytes_of_all_threads(work: Callable[[], object], held: Iterable[Tensor]) -> int:
    """The most tensor memory alive at any moment of `work`, counting the tensors `held` before it."""
    gc.collect()
    with LiveBytes(held) as meter:
        work()
    return meter.peak


def _tensors(output: Any) -> Iterable[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    return [tensor for item in output for tensor in _tensors(item)] if isinstance(output, (tuple, list)) else []
