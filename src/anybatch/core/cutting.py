"""Cuts batches by the given split, smaller after an out-of-memory error, and larger again after batches that fit."""

import warnings
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from anybatch.core.batch import Batch, check_row_dim
from anybatch.core.events import Events, Resize
from anybatch.core.hooks import PassHook
from anybatch.core.parallelism import Ranks
from anybatch.core.splits import (
    AsGiven,
    Dealt,
    Learn,
    MicroBatches,
    Split,
    Workload,
    in_arrival_order,
    size_that_ran,
    smaller,
)
from anybatch.errors import MemoryLimitError, user_stacklevel

EVERY = 10
"""Number of good batches between doublings; half of it once the size that failed is no longer a ceiling."""
WAIT = 20
"""The size that failed is tried again after this many batches that fit; each further failure doubles this."""
FREE = 1.5
"""The size that failed is tried at once if this many times as much memory is free as when it failed."""


class Regrowth:
    """Policy for growing micro-batches again after memory ran out.

    >>> growth = Regrowth()
    >>> growth.fail(8, free=None)
    >>> [growth.succeed(4, lambda: None) for _ in range(20)][9::10]
    [7, 8]
    """

    def __init__(self) -> None:
        self.highest = 0
        """Largest size that failed since the original split was last in use."""
        self._failed = 0
        self._free: int | None = None
        self._num_good = 0
        self._wait = WAIT
        self._tried_again: set[int] = set()

    def fail(self, size: int, free: int | None) -> None:
        """Record that micro-batches of this size did not fit, and the free bytes at that time."""
        if size in self._tried_again:
            self._wait *= 2
        self.highest = max(self.highest, size)
        self._failed, self._free, self._num_good = size, free, 0

    def succeed(self, size: int, free: Callable[[], int | None]) -> int:
        """Record that this size fitted, and return the size for the next batch."""
        self._num_good += 1
        if self._num_good % (EVERY if self._failed else EVERY // 2):
            return size
        if self._failed and (self._num_good >= self._wait or self._is_freer(free())):
            self._tried_again.add(self._failed)
            self._failed = 0
        return min(2 * size, self._failed - 1) if self._failed else 2 * size

    def arrive(self) -> None:
        """Record that the original split is in use again. The wait after the next failure is kept."""
        self.highest = self._failed = 0

    def _is_freer(self, free: int | None) -> bool:
        return free is not None and self._free is not None and free > FREE * self._free


class Cutting:
    """Cuts one batch after another, smaller after memory ran out. `MicroBatches` are cut only after memory ran out."""

    def __init__(self, split: Split, free: Callable[[], int | None] = lambda: None) -> None:
        self.split = split
        self._free = free
        """Returns the free bytes on the model's device; None if they are not known."""
        self._given: Split = AsGiven()
        self._asked: Split | None = None
        """Split before memory ran out; None if it is in use."""
        self._bound = 0
        """`bound` of the original split, to restore it exactly; 0 if the size that failed was far below it."""
        self._regrowth = Regrowth()
        self._has_warned = False
        self._is_row_dim_known = False

    def cut(self, batch: Batch, workload: Callable[[], Workload], *, as_they_came: bool = False) -> MicroBatches:
        """Cut `batch`; a split that chooses its size by the workload gets it first."""
        if isinstance(batch, MicroBatches):
            return self._given.cut(batch)
        choose_for = self.split.choose_for
        if choose_for is not None:
            choose_for(workload(), batch)
        cut = self.split.cut(batch)
        if as_they_came:
            cut = in_arrival_order(self.split, batch, cut)
        if not self._is_row_dim_known and len(cut) > 1:
            self._is_row_dim_known = True
            if self.split.reads_dim_0:
                check_row_dim(workload().model, batch)
        return cut

    def again(self, batch: Batch, ranks: Ranks) -> Callable[[MicroBatches | None, str], None]:
        """Return a function that makes micro-batches smaller, to be called each time that this batch starts again.

        If none can be smaller, the same ones are tried once more, because another process may have taken the memory; after
        that it raises, and the next batch is cut by the split that was in use before.
        """
        split, first, is_last = self.split, None, False

        def start_again(ran: MicroBatches | None, reason: str) -> None:
            nonlocal first, is_last
            first = first or ran
            try:
                is_last = not self._shrink(batch, ran, ranks, reason, free=self._free(), is_last=is_last)
            except MemoryLimitError:
                self._as_before(split, first)
                raise

        return start_again

    def _shrink(
        self, batch: Batch, ran: MicroBatches | None, ranks: Ranks, reason: str, *, free: int | None, is_last: bool
    ) -> bool:
        """Use smaller micro-batches than `ran` from now on; if no rank can, return False, or raise if `is_last`."""
        is_given = isinstance(batch.batch if isinstance(batch, Dealt) else batch, MicroBatches)
        before, size = self.split, None if ran is None or is_given else size_that_ran(self.split, ran)
        bound = 0 if size is None else before.bound
        found = None if ran is None else smaller(self._given if is_given else self.split, ran)
        if not ranks.any(found is not None):
            if not is_last:
                return False
            where = "before the first micro-batch ran" if ran is None else _least(ran)
            need = self.split.need
            predicted = "" if need is None else f" An update with one row needs {need}, as predicted."
            raise MemoryLimitError(
                f"memory ran out {where} ({reason}).{predicted} Gradients, buffers and random state are as they were. Use "
                "shorter rows, autocast=torch.bfloat16, torch.utils.checkpoint inside the model, or a smaller model."
            )
        if found is None:
            return True  # other ranks can make theirs smaller
        if is_given:
            self._given = found
            return True
        self.split = found
        if size is not None:
            if self._asked is None:
                self._asked, self._bound = before, bound if bound < 2 * size else 0
            self._regrowth.fail(size, free)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"memory ran out ({reason}), and the batch started again in smaller micro-batches: {self.split!r} from now on. "
                "They grow again after batches that go well. Nothing is lost; this is said once.",
                stacklevel=user_stacklevel(),
            )
        return True

    def went_well(self, ran: MicroBatches | None, events: Events) -> None:
        """Grow micro-batches, if they are due, after a batch that fitted at once."""
        if self._asked is None or ran is None or len(ran) == 1:
            return
        size = self.split.bound or size_that_ran(
            self.split, ran
        )  # a split that tunes may run smaller ones than its bound
        following = 0 if size is None else self._regrowth.succeed(size, self._free)
        if size is not None and following > size and self._grow(self._asked, following):
            events.begin(Resize)
            events.end(Resize, split=repr(self.split))

    def _grow(self, asked: Split, size: int) -> bool:
        """Allow micro-batches of `size`, or use the given split if that is as large; return False if it has no sizes."""
        resized = self.split.resized
        if size < self._regrowth.highest:
            self.split = self.split if resized is None else resized(size)
            return resized is not None
        self.split = asked if asked is not self.split or resized is None else resized(max(size, self._bound))
        self._asked = None
        self._regrowth.arrive()
        return True

    def _as_before(self, split: Split, ran: MicroBatches | None) -> None:
        """Return to `split`, which cut `ran`: a batch that fits in no size says nothing about sizes."""
        size = None if ran is None else size_that_ran(split, ran)
        resized = split.resized
        # a split that changes itself gets its former size back
        self.split = resized(size) if split is self.split and resized is not None and size is not None else split
        if self._asked is split:
            self._asked = None
            self._regrowth.arrive()


def _least(ran: MicroBatches) -> str:
    """Say why these micro-batches cannot be smaller, for an error."""
    if ran.whole:
        return "in micro-batches that must stay whole (MicroBatches(whole=True))"
    if ran.together > 1:
        return f"in micro-batches of {ran.together} rows that belong together (groups=), which are never torn"
    return "with a single row in each micro-batch"


class Stopwatch(PassHook):
    """Timer of micro-batches for a split that learns from times; a device is timed by events, read once per batch."""

    def __init__(self, learn: Learn, ran: MicroBatches, device: torch.device | None) -> None:
        self._learn = learn
        self._ran = ran
        self._device = None if device is None or device.type == "cpu" else device
        self._laps: list[tuple[int, Any]] = [(-1, self._now())]

    def after_pass(self, micro_batch: int, *, is_kept: bool, reports: bool) -> None:
        if reports:
            self._laps.append((micro_batch, self._now()))

    def finish(self) -> None:
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
