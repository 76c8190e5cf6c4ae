"""Timing micro-batches for a split that learns from it."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from anybatch.core.hooks import PassHook
from anybatch.core.micro_batches import MicroBatches, Split
from anybatch.core.nesting import Batch

Learn = Callable[[MicroBatches, Sequence[float | None]], None]


class Stopwatch(PassHook):
    """Seconds of each micro-batch, from the end of the one before it; on a device, by events that are read at the finish.

    Reading events waits for the device once per batch; nothing else here does.
    """

    def __init__(
        self,
        learn: Learn,
        ran: MicroBatches,
        device: torch.device,
    ) -> None:
        self._learn = learn
        self._ran = ran
        self._device = None if device.type == "cpu" else device
        self._laps: list[tuple[int, Any]] = [(-1, self._now())]

    def after_pass(self, micro_batch: int, *, is_kept: bool, reports: bool) -> None:
        if reports:
            self._laps.append((micro_batch, self._now()))

    def finish(self) -> None:
        """The batch has run whole: tell the split, unless no micro-batch ran for itself."""
        if len(self._laps) == 1:
            return
        if self._device is not None:
            self._laps[-1][1].synchronize()
        seconds: list[float | None] = [None] * len(self._ran)
        for (_, before), (index, after) in zip(self._laps, self._laps[1:], strict=False):
            seconds[index] = after - before if self._device is None else before.elapsed_time(after) / 1000
        self._learn(self._ran, seconds)

    def _now(self) -> Any:
        if self._device is None:
            return perf_counter()
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        return event


def stopwatch_for(split: Split, batch: Batch, ran: MicroBatches, device: torch.device | None) -> Stopwatch | None:
    """Return a stopwatch if the split learns from times, and `batch` did not come cut already."""
    learn = split.learn
    if learn is None or isinstance(batch, MicroBatches):
        return None
    return Stopwatch(learn, ran, device or torch.device("cpu"))
