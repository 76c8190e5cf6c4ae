"""`KeptMemory`: what batches leave behind in this process beside the tensors that are known."""

from collections.abc import Callable, Iterable

from torch import Tensor

from anybatch.host_memory import allocated_on_host
from anybatch.memory.tracing.meter import storages_of

LITTLE = 2**20
"""What Python's own objects and the buffers of matrix products come to: not counted, if that is all."""


class KeptMemory:
    """Bytes that stay after batches have run on the CPU, in the memory that was given for them.

    Kernels of oneDNN keep code for each shape that they meet, 30 to 90 KB a convolution, and give nothing back before there
    are a thousand. What is allocated between `begin` and `look` counts, but for the batch and `known()`: weights, gradients
    and state. What others allocate between two batches is theirs; what is gone by then of the last one no longer counts.
    """

    def __init__(self) -> None:
        self._sum = 0
        self._known: Callable[[], Iterable[Tensor]] = tuple
        self._batch: dict[int, int] = {}
        self._before: int | None = None
        self._after = self._grown = self.most_grown = 0

    @property
    def bytes(self) -> int:
        """All that is kept; 0 while it is little."""
        return self._sum if self._sum >= LITTLE else 0

    @property
    def next_time(self) -> int:
        """What will be kept when the next batch has run, which may have another new shape."""
        expected = self._sum + self.most_grown
        return expected if expected >= LITTLE else 0

    def left_of(self, memory: int) -> int:
        """What rows may have of this memory now: half of it at least, because kernels would else take all of a small one."""
        return max(memory - self.bytes, memory // 2)

    def begin(self, known: Callable[[], Iterable[Tensor]], batch: Iterable[Tensor]) -> None:
        """From now on everything counts that is not known; the batch is not held."""
        self._known, self._batch = known, storages_of(batch)
        self._before = self._beside()
        if self._before is not None:
            self._add(-min(max(self._after - self._before, 0), max(self._grown, 0)))
            self._grown = 0

    def look(self, batch: Iterable[Tensor] = ()) -> None:
        """Take note of what stayed since `begin`, or the last look; not of what the batch was copied into."""
        if self._before is None:
            return
        self._batch |= storages_of(batch)
        self._after = self._beside() or 0
        self._grown, self._before = self._after - self._before, self._after
        self.most_grown = max(self.most_grown, self._grown)
        self._add(self._grown)

    def end(self) -> None:
        """From now on nothing counts, and nothing is held."""
        self._before, self._known = None, tuple

    def expect(self, kept: int, at_once: int) -> None:
        """Planning has left so much behind, and the next batch may leave so much at once."""
        self._add(kept)
        self.most_grown = max(self.most_grown, at_once)

    def _add(self, grown: int) -> None:
        self._sum = max(self._sum + grown, 0)

    def _beside(self) -> int | None:
        allocated = allocated_on_host()
        return None if allocated is None else allocated - sum((storages_of(self._known()) | self._batch).values())
