"""Predict the peak memory of any micro-batch size from the timelines of a few."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anybatch.memory.recorder import Timeline

PassShape = tuple[int, int | None]  # rows of a micro-batch, and their length if it varies


@dataclass(frozen=True, slots=True)
class Envelope:
    """Upper envelope of the bytes alive after each op, as functions of the shape of a micro-batch.

    Bytes after an op are linear in the rows and quadratic in their length (attention). The peak is the maximum of many such
    curves: convex and piecewise, so a curve through a few peaks would be wrong.
    """

    curves: tuple[tuple[float, ...], ...]  # coefficients of `curve_terms(shape)` for each op that can be the highest

    def peak(self, shape: PassShape) -> int:
        values = curve_terms(shape)
        return round(max(sum(one * value for one, value in zip(curve, values, strict=True)) for curve in self.curves))


def curve_terms(shape: PassShape) -> tuple[float, ...]:
    """Return the basis functions of the bytes after an op."""
    rows, length = shape
    if length is None:
        return (1, rows)
    return (1, rows, length, rows * length, length**2, rows * length**2)


def fit_envelope(
    shapes: Sequence[PassShape], timelines: Sequence[Timeline], needed: Sequence[PassShape] = ()
) -> Envelope | None:
    """Fit the envelope through as many timelines as there are terms; None if they ran different ops.

    Ops that are highest for none of the `needed` shapes are left out; without `needed`, for no number of rows.
    """
    if any(timeline.ops != timelines[0].ops for timeline in timelines):
        return None
    live = torch.tensor([timeline.live for timeline in timelines], dtype=torch.float64)
    basis = torch.tensor([curve_terms(shape) for shape in shapes], dtype=torch.float64)
    curves = torch.linalg.solve(basis, live).T.unique(dim=0)
    if not needed:
        return Envelope(_steepest(curves))
    terms = torch.tensor([curve_terms(shape) for shape in needed], dtype=torch.float64)
    winners = {int((curves @ values).argmax()) for values in terms}
    return Envelope(tuple(tuple(curves[index].tolist()) for index in sorted(winners)))


def _steepest(lines: Tensor) -> tuple[tuple[float, ...], ...]:
    """Return the lines that form the maximum for positive x."""
    kept: list[tuple[float, ...]] = []
    for fixed, per_row in sorted(lines.tolist(), key=lambda line: (-line[1], -line[0])):
        if not kept or fixed > kept[-1][0]:
            kept.append((fixed, per_row))
    return tuple(kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Peak by micro-batch size, in rows, or in tokens if `row_length` or `lengths` is set."""

    num_rows: int
    tried: tuple[tuple[int, int], ...]  # (size, peak) of trial updates in two micro-batches, smallest first
    envelope: Envelope | None  # prediction for all other sizes; None if each size has to be tried
    lengths: tuple[int, ...] = ()  # lengths of rows, shortest first, if they differ
    row_length: int = 1  # size of one row, if all have one length
    kept_per_pass: int = 0  # bytes that each micro-batch after the second leaves until the end of the update
    outside_once: int = 0  # bytes outside torch's allocator, for any size
    outside_each: int = 0  # bytes outside torch's allocator, per micro-batch
    fixed: int = 0
    """Bytes that do not depend on the micro-batch: weights, optimizer state, gradients and the batch, if known."""

    def peak(self, size: int) -> int:
        """Predict the peak of an update in micro-batches of at most `size`."""
        return self._peak_of_two(size) + self.kept_per_pass * max(self._num_passes(size) - 2, 0)

    def outside(self, size: int) -> int:
        return self.outside_once + self.outside_each * self._num_passes(size)

    def worst(self, size: int) -> PassShape:
        """Return the shape of this size that needs most memory."""
        if not self.lengths:
            return max(size // self.row_length, 1), None
        fitting = [length for length in self.lengths if length <= size]
        shapes: list[PassShape] = [(min(size // length, self.num_rows), length) for length in fitting]
        shapes = shapes or [(1, self.lengths[0])]
        return shapes[-1] if self.envelope is None else max(shapes, key=self.envelope.peak)

    def least(self, smallest: int) -> int:
        """Return the lowest peak. Because of `kept_per_pass` it need not be that of the smallest size."""
        whole = self.num_rows * self.row_length
        return min(self.peak(smallest * 2**power) for power in range((whole // smallest).bit_length()))

    def largest(self, limit: int, smallest: int, most: int) -> int:
        """Return the largest size up to `most` with a peak of at most `limit`; 0 if there is none.

        The smallest sizes may need more than larger ones, so the search starts at the last power of two that fits.
        """
        one = 1 if self.lengths else self.row_length
        powers = [smallest * 2**power for power in range((most // smallest).bit_length())]
        start = max((size for size in powers if self.peak(size) <= limit), default=0)
        steps = (min(2 * start - 1, most) - start) // one
        return start + one * largest_below(limit, lambda step: self.peak(start + step * one), steps) if start else 0

    def _num_passes(self, size: int) -> int:
        rows = max(size // (self.lengths[-1] if self.lengths else self.row_length), 1)
        return -(-self.num_rows // rows)

    def _peak_of_two(self, size: int) -> int:
        """Predict the peak of two micro-batches; between two tried sizes on their chord, an upper bound of a convex curve."""
        known = dict(self.tried)
        if size in known:
            return known[size]
        if self.envelope is not None and (not self.tried or size > self.tried[-1][0]):
            return self.envelope.peak(self.worst(size))
        below = [one for one in self.tried if one[0] < size]
        above = [one for one in self.tried if one[0] > size]
        if above and not below:
            return above[0][1]
        if above:
            low, high = below[-1], above[0]
        else:  # larger than all tried sizes
            low, high = self.tried[-2:] if len(self.tried) > 1 else ((0, self.fixed), self.tried[-1])
        return round(low[1] + (size - low[0]) / (high[0] - low[0]) * (high[1] - low[1]))


def largest_below(limit: float, peak: Callable[[int], float], most: int) -> int:
    """Bisect for the largest size from 1 to `most` with a peak of at most `limit`; 0 if there is none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if peak(middle) <= limit:
            low = middle
        else:
            high = middle - 1
    return low
