"""The way back up after memory ran out: when micro-batches grow again, and how far."""

from collections.abc import Callable

EVERY = 10
"""After this many batches that went well, micro-batches double; after half as many, once the size that failed may be tried."""
WAIT = 20
"""After this many, the size that failed is tried again; each time that it fails again, this doubles."""
FREE = 1.5
"""With this many times the memory free that there was when it failed, the size that failed is not waited for."""


class WayBack:
    """Sizes that failed, and what is tried when.

    >>> way = WayBack()
    >>> way.fail(8, free=None)
    >>> [way.succeed(4, lambda: None) for _ in range(20)][9::10]
    [7, 8]
    """

    def __init__(self) -> None:
        self.highest = 0
        """The largest size that failed since the last time that all was well."""
        self._failed = 0
        self._free: int | None = None
        self._num_good = 0
        self._wait = WAIT
        self._tried_again: set[int] = set()

    def fail(self, size: int, free: int | None) -> None:
        """Micro-batches of this size did not fit, when so much was free."""
        if size in self._tried_again:
            self._wait *= 2
        self.highest = max(self.highest, size)
        self._failed, self._free, self._num_good = size, free, 0

    def succeed(self, size: int, free: Callable[[], int | None]) -> int:
        """Micro-batches of this size fitted; the size for the next batch, which is the same most of the time."""
        self._num_good += 1
        if self._num_good % (EVERY if self._failed else EVERY // 2):
            return size
        if self._failed and (self._num_good >= self._wait or self._is_freer(free())):
            self._tried_again.add(self._failed)
            self._failed = 0
        return min(2 * size, self._failed - 1) if self._failed else 2 * size

    def arrive(self) -> None:
        """Micro-batches have the size that was asked for again; how long to wait after the next failure is kept."""
        self.highest = self._failed = 0

    def _is_freer(self, free: int | None) -> bool:
        return free is not None and self._free is not None and free > FREE * self._free
