"""`Doubling`: rows that double from batch to batch until they do not fit."""

from collections.abc import Sequence

from anybatch.core import Batch, MicroBatches, Rows, Split


class Doubling(Split):
    """One row in the first batch, twice as many in each that follows, until memory runs out or `most` is reached.

    >>> import torch
    >>> doubling = Doubling(most=3)
    >>> cuts = []
    >>> for _ in range(4):
    ...     cuts.append(doubling.cut(torch.zeros(12)))
    ...     doubling.learn(cuts[-1], [])
    >>> [len(cut) for cut in cuts]
    [12, 6, 4, 4]
    """

    def __init__(self, most: int | None = None) -> None:
        self.size = 1
        self.is_settled = False
        """True when sizes are no longer tried."""
        self._most = most

    def cut(self, batch: Batch) -> MicroBatches:
        """The micro-batches of `batch`, at the size of the moment."""
        return Rows(self.size).cut(batch)

    def learn(self, ran: MicroBatches, seconds: Sequence[float | None]) -> None:
        """Take note that the micro-batches that were cut last have fitted."""
        if self.is_settled or len(ran) == 1:
            return
        self.size = 2 * self.size if self._most is None else min(2 * self.size, self._most)
        self.is_settled = self.size == self._most

    def resized(self, size: int) -> "Doubling":
        """This split, from now on at this size."""
        self.size = size
        return self

    def shrink(self, ran: MicroBatches) -> "Doubling | None":
        """Half of what did not fit, and no more tries; None where that was one row."""
        largest = max(len(rows) for rows in ran.row_numbers)
        if largest == 1:
            return None
        self.size, self.is_settled = largest // 2, True
        return self
