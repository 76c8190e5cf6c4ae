"""Grouping a loader of ready-made micro-batches into batches."""

from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import islice
from numbers import Integral

from anybatch.core.display import called, name_of
from anybatch.core.micro_batches import MicroBatches
from anybatch.core.nesting import Batch
from anybatch.errors import SplitError

WindowSize = int | Callable[[int], int]


def windows(loader: Iterable[Batch], size: WindowSize, *, whole: bool = False) -> "Windows":
    """Group a loader that yields micro-batches into `MicroBatches` of `size` each; the last is as short as it is.

    With `whole`, they are never cut further, where their rows belong together.

    `size` may be a function of the update number, which starts at 0 and goes on counting when the result is iterated
    again for the next epoch: a schedule of batch sizes.

    >>> [list(batch) for batch in windows([10, 11, 12, 13, 14], 2)]
    [[10, 11], [12, 13], [14]]
    >>> [len(batch) for batch in windows(range(7), lambda update: 1 + update)]
    [1, 2, 3, 1]
    """
    return Windows(loader, size, whole=whole)


class Windows:
    """An iterable of `MicroBatches`; `update` is the number of the next one, over all epochs. Set it to resume."""

    def __init__(self, loader: Iterable[Batch], size: WindowSize, *, whole: bool = False) -> None:
        self.loader = loader
        self.whole = whole
        self.size = size
        self.update = 0
        self._size_at(0)

    def __repr__(self) -> str:
        return called("Windows", name_of(self.loader), size=self.size)

    def __iter__(self) -> Iterator[MicroBatches]:
        micro_batches = iter(self.loader)
        while group := tuple(islice(micro_batches, self._size_at(self.update))):
            self.update += 1
            yield MicroBatches(group, whole=self.whole)

    def __len__(self) -> int:
        """How many windows the next pass over the loader gives."""
        if not isinstance(self.loader, Sized):
            raise TypeError(f"the loader, a {type(self.loader).__name__}, has no length, so its windows have none.")
        left, update = len(self.loader), self.update
        while left > 0:
            left -= self._size_at(update)
            update += 1
        return update - self.update

    def _size_at(self, update: int) -> int:
        size = self.size(update) if callable(self.size) else self.size
        if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
            raise SplitError(
                f"windows: size is {size!r} at update {update}; it must be a whole number of micro-batches, 1 or more."
            )
        return int(size)
