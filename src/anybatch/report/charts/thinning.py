"""Long traces made short enough to draw: the picture keeps every spike, the smooth line follows the middle."""

from collections.abc import Sequence
from itertools import accumulate

MOST_POINTS = 1000
"""A line of more points than this is thinned: no screen has so many columns, and the page stays small."""
MOST_ROWS = 500
"""A table of more rows than this is thinned."""


def thin(values: Sequence[float | None], most: int = MOST_POINTS) -> list[int]:
    """Which points to draw, in order: the lowest and the highest of each stretch, and the first and last of all.

    Every value, however short its spike, that would set the top or the bottom of a pixel column is kept. At most
    `most` points; all of them where there are no more than that.
    """
    if len(values) <= most:
        return list(range(len(values)))
    num_stretches = max(1, (most - 2) // 2)
    kept = {0, len(values) - 1}
    for stretch in range(num_stretches):
        start, stop = (len(values) * edge // num_stretches for edge in (stretch, stretch + 1))
        known = [(value, index) for index in range(start, stop) if (value := values[index]) is not None]
        if known:
            kept.add(min(known)[1])
            kept.add(max(known)[1])
        else:
            kept.add(start)  # a gap stays a gap
    return sorted(kept)


def evenly_spaced(count: int, most: int = MOST_ROWS) -> list[int]:
    """Evenly spaced positions, the first and the last among them: the rows of a table of numbers."""
    if count <= most:
        return list(range(count))
    return [round(step * (count - 1) / (most - 1)) for step in range(most)]


def smooth(values: Sequence[float | None], width: int) -> list[float | None]:
    """The mean of each point and its neighbours, `width` in all; None where all of them are missing.

    Towards the ends fewer are taken, as many before the point as after it, so that the line does not lean.
    """
    sums = [0.0, *accumulate(0.0 if value is None else value for value in values)]
    counts = [0, *accumulate(int(value is not None) for value in values)]
    means: list[float | None] = []
    for index in range(len(values)):
        reach = min(width // 2, index, len(values) - 1 - index)
        start, stop = index - reach, index + reach + 1
        count = counts[stop] - counts[start]
        means.append((sums[stop] - sums[start]) / count if count else None)
    return means
