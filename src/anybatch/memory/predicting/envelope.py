"""The peak of any size from the timelines of a few: a curve per op, and the highest of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anybatch.memory.tracing import Timeline

PassShape = tuple[int, int | None]
"""Rows of a micro-batch, and their length where it varies."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """The upper envelope of the bytes alive after each op, as functions of the shape of a micro-batch.

    Bytes after an op are linear in the rows, and quadratic in their length (attention). The peak is the highest of many such
    curves: convex and piecewise, which no curve through a few peaks is.
    """

    curves: tuple[tuple[float, ...], ...]
    """For each op that can be the highest, the coefficients of `curve_terms(shape)`."""

    def peak(self, shape: PassShape) -> int:
        """The bytes of the highest op."""
        values = curve_terms(shape)
        return round(max(sum(one * value for one, value in zip(curve, values, strict=True)) for curve in self.curves))


def curve_terms(shape: PassShape) -> tuple[float, ...]:
    """The terms whose multiples add up to the bytes of an op."""
    rows, length = shape
    if length is None:
        return (1, rows)
    return (1, rows, length, rows * length, length**2, rows * length**2)


def fit_envelope(
    shapes: Sequence[PassShape], timelines: Sequence[Timeline], needed: Sequence[PassShape] = ()
) -> Envelope | None:
    """The envelope through these timelines; None where they ran different ops, so that there is no curve per op.

    There are as many shapes as terms. Where lengths vary, ops that are highest for none of the `needed` shapes are left out;
    else those that are highest for no number of rows.
    """
    if any(timeline.ops != timelines[0].ops for timeline in timelines):
        return None
    live = torch.tensor([timeline.live for timeline in timelines], dtype=torch.float64)
    basis = torch.tensor([curve_terms(shape) for shape in shapes], dtype=torch.float64)
    curves = torch.linalg.solve(basis, live).T.unique(dim=0)
    kept = _steepest(curves) if not needed else _highest(curves, needed)
    return Envelope(tuple(tuple(curve) for curve in kept.tolist()))


def largest_below(limit: float, peak: Callable[[int], int], most: int) -> int:
    """The largest size from 1 to `most` whose peak is at most `limit`, by bisection; 0 if there is none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if peak(middle) <= limit:
            low = middle
        else:
            high = middle - 1
    return low


def _steepest(lines: Tensor) -> Tensor:
    """The lines that no steeper one lies above at 0 already."""
    kept = []
    highest = -float("inf")
    for fixed, per_row in sorted(lines.tolist(), key=lambda line: (-line[1], -line[0])):
        if fixed > highest:
            kept.append((fixed, per_row))
            highest = fixed
    return torch.tensor(kept, dtype=torch.float64)


def _highest(curves: Tensor, needed: Sequence[PassShape]) -> Tensor:
    winners = [int((curves @ torch.tensor(curve_terms(shape), dtype=torch.float64)).argmax()) for shape in needed]
    return curves[sorted(set(winners))]
