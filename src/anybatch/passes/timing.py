"""Timing micro-batches for a split that learns from it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any, Protocol

import torch

from anybatch.batches import Batch, MicroBatches, Split

Learn = Callable[[MicroBatches, Sequence[float | None]], None]


class Laps(Protocol):
    """Whoever is told when micro-batches have run."""

    def lap(self, index: int) -> None:
        """Micro-batch `index` has run."""

    def finish(self) -> None:
        """The batch has run whole."""

    def watched(self) -> AbstractContextManager[object]:
        """The block in which the batch runs."""


UNWATCHED = nullcontext()


class Untimed:
    """Nobody wants to know; the batch runs in the block of its split all the same."""

    def __init__(self, watching: Callable[[], AbstractContextManager[object]] = lambda: UNWATCHED) -> None:
        self.watched = watching

    def lap(self, index: int) -> None:
        pass

    def finish(self) -> None:
        pass


UNTIMED = Untimed()


class Stopwatch:
    """Seconds of each micro-batch, from the end of the one before it; on a device, by events that are read at the finish.

    Reading events waits for the device once per batch; nothing else here does.
    """

    def __init__(
        self,
        learn: Learn,
        ran: MicroBatches,
        device: torch.device,
        watching: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> None:
        self._learn = learn
        self._watching = watching
        self._ran = ran
        self._device = None if device.type == "cpu" else device
        self._laps: list[tuple[int, Any]] = [(-1, self._now())]

    def watched(self) -> AbstractContextManager[object]:
        """The block in which the batch runs, of a split that wants to see what it takes."""
        return UNWATCHED if self._watching is None else self._watching()

    def lap(self, index: int) -> None:
        """Micro-batch `index` has run."""
        self._laps.append((index, self._now()))

    def finish(self) -> None:
        """The batch has run whole: tell the split, unless no micro-batch ran for itself."""
        if len(self._laps) == 1:
            if self._watching is not None:
                self._learn(self._ran, [None] * len(self._ran))
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


def laps_of(
    split: Split, batch: Batch, ran: MicroBatches, device: torch.device | None, *, is_timed: bool = True
) -> Laps:
    """A stopwatch if the split learns, and `batch` did not come cut already."""
    learn, watching = split.learn, split.watching
    if learn is None or isinstance(batch, MicroBatches):
        return UNTIMED
    if not is_timed:
        return UNTIMED if watching is None else Untimed(watching)
    return Stopwatch(learn, ran, device or torch.device("cpu"), watching)
