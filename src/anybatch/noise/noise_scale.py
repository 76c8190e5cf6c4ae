"""The noise scale: the batch, in rows, at which the noise of a gradient is as large as what it says."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

FEWEST_WINDOWS = 5
"""Fewer say too little: the interval of four would be twice as wide as that of eight."""
NORMAL_QUANTILE = 1.6448536269514722
"""Of 0.95, of the normal distribution: the interval leaves out 5 % on either side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale:
    """rows * |noise|^2 / |signal|^2 of a batch's gradient, whatever the batch: a property of the data and the weights."""

    rows: float
    """inf where no signal was seen at all."""
    low: float
    high: float
    """The 90 % interval of sampling, by Fieller's theorem; inf where the signal is not told from 0."""
    windows: int
    """How many measured updates it is from."""


@dataclass(frozen=True, slots=True)
class WindowNoise:
    """What one batch says, without bias: both are means over the draw of its rows."""

    row_noise: float
    """|noise|^2 of the gradient of a single row."""
    signal: float
    """|gradient of all rows there are|^2; of one batch it may be below 0."""

    @staticmethod
    def of(norm: float, squares: float, share_squares: float, rows: float) -> "WindowNoise":
        """From `norm`, the batch's |g|, `squares`, sum_k |g_k|^2 of the parts that add up to g, and sum_k (units_k / units)^2.

            signal = (|S|^2 - sum_k |S_k|^2) / (U^2 - sum_k U_k^2),  noise = (sum_k |S_k|^2 - signal * sum_k U_k^2) / U^2

        with S_k = U * g_k: the products of different micro-batches, whose rows were drawn apart, hold no noise. Without bias
        for any cut that does not look at what rows hold, micro-batches of any sizes, and any units.
        """
        signal = (norm * norm - squares) / (1.0 - share_squares)
        return WindowNoise(rows * (squares - signal * share_squares), signal)


def noise_scale_of(windows: Sequence[WindowNoise]) -> NoiseScale:
    """The ratio of means over `windows`, two or more: a mean of their ratios would be biased, and may divide by nearly 0."""
    noise, signal = [one.row_noise for one in windows], [one.signal for one in windows]
    ratio = _mean(noise) / _mean(signal) if _mean(signal) > 0 else math.inf
    low, high = fieller(noise, signal)
    return NoiseScale(rows=max(ratio, 0.0), low=low, high=high, windows=len(windows))


def fieller(above: Sequence[float], below: Sequence[float]) -> tuple[float, float]:
    """The 90 % interval of mean(above) / mean(below), both of the same draws, for a ratio that is not negative.

    All r for which mean(above - r * below) is not told from 0: those between the roots of a quadratic; above the upper root,
    where mean(below) itself is not told from 0.

    >>> low, high = fieller([9.0, 11.0, 10.0, 12.0], [2.0, 2.2, 1.9, 2.1])
    >>> round(low, 2), round(high, 2)
    (4.52, 5.71)
    >>> fieller([9.0, 11.0, 10.0, 12.0], [2.0, -2.2, 1.9, -2.1])[1]
    inf
    """
    count, quantile = len(above), student_quantile(len(above) - 1)
    mean_above, mean_below = _mean(above), _mean(below)
    factor = quantile**2 / (count - 1) / count

    def spread(one: Sequence[float], other: Sequence[float]) -> float:
        middle, center = _mean(one), _mean(other)
        return factor * math.fsum((a - middle) * (b - center) for a, b in zip(one, other, strict=True))

    square = mean_below**2 - spread(below, below)
    half = mean_above * mean_below - spread(above, below)
    rest = mean_above**2 - spread(above, above)
    inside = half**2 - square * rest
    if inside < 0 or square == 0:
        return 0.0, math.inf
    roots = sorted(((half - math.sqrt(inside)) / square, (half + math.sqrt(inside)) / square))
    if square > 0 and mean_below > 0:
        return max(roots[0], 0.0), max(roots[1], 0.0)
    return (max(roots[1], 0.0) if rest > 0 and square < 0 else 0.0), math.inf


def student_quantile(freedom: int) -> float:
    """Student's t of 0.95, by its expansion around the normal quantile; within 1 % from 4 degrees of freedom on.

    >>> round(student_quantile(4), 2), round(student_quantile(30), 3)
    (2.13, 1.697)
    """
    z = NORMAL_QUANTILE
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
