"""The peak of every size of micro-batch of one batch."""

from dataclasses import dataclass, replace

from anybatch.memory.predicting.envelope import Envelope, PassShape
from anybatch.proof import CheckCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Sizes to peaks: rows, or tokens where `row_length` or `lengths` say so."""

    num_rows: int
    tried: tuple[tuple[int, int], ...]
    """(size, peak) of updates in two micro-batches that were tried themselves, smallest first."""
    envelope: Envelope | None
    """The peak of all others; None where each has to be tried."""
    lengths: tuple[int, ...] = ()
    """The lengths of rows, shortest first, where they differ."""
    row_length: int = 1
    """The size of one row, where rows do not differ in length."""
    left_behind: int = 0
    """What each micro-batch beyond the second leaves until the end of the update."""
    outside_once: int = 0
    """Of the peak, what lies outside torch's allocator whatever the size."""
    outside_each: int = 0
    """The same for each micro-batch."""
    batch_bytes: int = 0
    """Of the peak, the whole batch, where it lies in the memory that is planned."""
    is_together: bool = False
    """True where micro-batches meet, so that the rows of the whole batch decide."""
    more: int = 0
    """What a larger batch takes beside, of the same rows."""

    fixed: int = 0
    """What rows of any number stand beside: weights, state, gradients and the batch, where it is known."""
    check: CheckCost | None = None
    """What comparing gradients takes before the first batch, where that counts."""

    def peak(self, size: int) -> int:
        """The peak of an update in micro-batches of at most `size`; without an envelope, between those that were tried."""
        return self.with_check(self._of_update(size), size)

    def with_check(self, peak: int, size: int) -> int:
        """The larger of this peak and that of the check, which looks at rows for micro-batches of `size`."""
        if self.check is None:
            return peak
        alike = self.check.size(size, one=self.lengths[-1] if self.lengths else self.row_length)
        return max(peak, self.check.copied + self._of_update(min(alike, self.num_rows * self.row_length)))

    def _of_update(self, size: int) -> int:
        rows = max(size // (self.lengths[-1] if self.lengths else self.row_length), 1)
        return self._of_two(size) + self.more + self.left_behind * max(-(-self.num_rows // rows) - 2, 0)

    def for_more_rows(self, num_rows: int, batch_bytes: int) -> "Peaks | None":
        """The peaks of a larger batch of like rows; None where they have to be tried."""
        if self.is_together:
            return None
        more = max(batch_bytes - self.batch_bytes, 0) if self.batch_bytes else 0
        return replace(self, num_rows=num_rows, more=more)

    def outside(self, size: int) -> int:
        """Of the peak, what lies outside torch's allocator."""
        rows = max(size // (self.lengths[-1] if self.lengths else self.row_length), 1)
        return self.outside_once + self.outside_each * -(-self.num_rows // rows)

    def worst(self, size: int) -> PassShape:
        """The largest micro-batch of this size."""
        if not self.lengths:
            return max(size // self.row_length, 1), None
        shapes: list[PassShape] = [
            (min(size // length, self.num_rows), length) for length in self.lengths if length <= size
        ]
        shapes = shapes or [(1, self.lengths[0])]
        return shapes[-1] if self.envelope is None else max(shapes, key=self.envelope.peak)

    def _of_two(self, size: int) -> int:
        known = dict(self.tried)
        if size in known:
            return known[size]
        if self.envelope is not None and (not self.tried or size > self.tried[-1][0]):
            return self.envelope.peak(self.worst(size))
        return self._on_chord(size)

    def _on_chord(self, size: int) -> int:
        """Between two sizes that were tried, on the line through both: peaks are convex in the size, so it lies above them."""
        below = max(((tried, peak) for tried, peak in self.tried if tried < size), default=None)
        above = min(((tried, peak) for tried, peak in self.tried if tried > size), default=None)
        if below is None and above is not None:
            return above[1]
        if above is None:  # beyond all that was tried
            below, above = self.tried[-2:] if len(self.tried) > 1 else ((0, self.fixed), self.tried[-1])
        assert below is not None
        share = (size - below[0]) / (above[0] - below[0])
        return round(below[1] + share * (above[1] - below[1]))
