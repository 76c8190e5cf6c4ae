"""Line and bar charts, each with its table of numbers; long lines are thinned but keep every spike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from anybatch.app.report.writing import capitalized, number, percent

MAX_POINTS = 1000
"""A line with more points is thinned: no screen has more columns, and the page stays small."""
MAX_ROWS = 500
"""A table with more rows is thinned."""
NUM_LOOKS = 6
"""Line dashes and marker shapes that the page's script draws."""
CROSS = 5
"""Index of the marker that is a cross."""
NUM_COLOURS = 6


class Table(NamedTuple):
    """Columns and rows of text; the first column names the row, the note says what is left out."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


class Key(NamedTuple):
    """Legend entry: a button that shows and hides the traces of its group."""

    name: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One figure of the page."""

    name: str
    """Suffix of the element's id."""
    title: str
    caption: str
    """One or two sentences on what the chart shows; also its text alternative."""
    figure: Mapping[str, Any]
    """`data`: lines, bands or bars; `x`, `y`: axes; `stops`: where arrow keys stop ("x", "bars"); `where`: words around x."""
    keys: tuple[Key, ...]
    table: Table
    height: int = 300
    is_wide: bool = False
    has_log: bool = False
    """Whether the page offers a logarithmic axis."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart, with a band if it is a mean."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: int = 1
    """Index in the palette, from 1."""
    dash: int = 0
    kind: Literal["line", "faint", "points", "area"] = "line"
    deviation: Sequence[float | None] = ()
    """Half the height of the band at each point."""
    labels: Sequence[str] = ()
    """Text of each point in addition to its value."""


def line_chart(
    name: str,
    series: Sequence[Series],
    *,
    x_title: str,
    x_unit: str = "",
    is_percent: bool = False,
    unit: str = "",
    from_zero: bool = False,
    **fields: Any,
) -> Chart:
    """Draw lines over a common x axis. `is_percent`: the values are fractions. `fields` are further fields of `Chart`."""
    if is_percent:
        series, unit = [_in_percent(line) for line in series], " %"
    values = [value for line in series for value in line.y if value is not None]
    data: list[dict[str, Any]] = []
    for group, line in enumerate(series):
        if any(half is not None for half in line.deviation):
            data.append(_band(line, group))
        data.append(_trace(line, group, is_percent=is_percent, unit=unit))
    figure = {
        "data": data,
        # without fractional x there are no ticks between whole numbers
        "x": {"title": x_title, "whole": all(x == int(x) for line in series for x in line.x)},
        "y": {"unit": unit, "zero": from_zero},
        "stops": "x",
        "where": ["", f" {x_unit}"] if x_unit else [f"{x_title} ", ""],
    }
    is_positive = bool(values) and min(values) > 0
    has_log = is_positive and not is_percent and not from_zero and max(values) > 3 * min(values)
    return Chart(name=name, figure=figure, keys=tuple(Key(line.name) for line in series), has_log=has_log, **fields)


def bar_chart(name: str, bars: Sequence[dict[str, Any]], lanes: Sequence[str], *, x_title: str, **fields: Any) -> Chart:
    """Draw horizontal bars, made by `bars_of`, in `lanes` from top to bottom."""
    figure = {
        "data": list(bars),
        "x": {"title": x_title, "whole": False},
        "y": {"unit": "", "zero": True, "lanes": list(lanes)},
        "stops": "bars",
        "where": ["", ""],
    }
    return Chart(name=name, figure=figure, **fields)


def bars_of(name: str, bars: Sequence[tuple[str, float, float, str]], *, colour: str, group: int) -> dict[str, Any]:
    """Describe the bars of one legend entry, each as (lane, start, length, text)."""
    return {
        "kind": "bars",
        "name": name,
        "group": group,
        "colour": colour,
        "x": _six_digits([length for _, _, length, _ in bars]),
        "starts": _six_digits([start for _, start, _, _ in bars]),
        "lanes": [lane for lane, _, _, _ in bars],
        "texts": [text for _, _, _, text in bars],
    }


def _in_percent(line: Series) -> Series:
    y, deviation = ([None if part is None else 100 * part for part in parts] for parts in (line.y, line.deviation))
    return replace(line, y=y, deviation=deviation)


def _trace(line: Series, group: int, *, is_percent: bool, unit: str) -> dict[str, Any]:
    kept = thin(line.y)
    trace: dict[str, Any] = {
        "kind": line.kind,
        "name": line.name,
        "group": group,
        "colour": f"--{'faint' if line.kind == 'faint' else 'series'}-{(line.colour - 1) % NUM_COLOURS + 1}",
        "look": line.dash % NUM_LOOKS,
        "x": _six_digits([line.x[index] for index in kept]),
        "y": _six_digits([line.y[index] for index in kept]),
        "percent": is_percent,
        "unit": unit,
    }
    if line.kind == "area":
        trace["fill"] = f"--band-{line.colour}"
    if line.labels:
        trace["labels"] = [line.labels[index] for index in kept]
    return trace


def _band(line: Series, group: int) -> dict[str, Any]:
    edges = [
        (x, middle - half, middle + half)
        for x, middle, half in zip(line.x, line.y, line.deviation, strict=True)
        if middle is not None and half is not None
    ]
    return {
        "kind": "band",
        "group": group,
        "colour": f"--band-{(line.colour - 1) % NUM_COLOURS + 1}",
        "x": _six_digits([x for x, _, _ in edges] + [x for x, _, _ in reversed(edges)]),
        "y": _six_digits([high for _, _, high in edges] + [low for _, low, _ in reversed(edges)]),
    }


def _six_digits(values: Sequence[float | None]) -> list[float | None]:
    """Round to six significant digits: more than a screen shows, in half the bytes."""
    return [None if value is None else float(f"{value:.6g}") for value in values]


def thin(values: Sequence[float | None], most: int = MAX_POINTS) -> list[int]:
    """Return the indices of at most `most` points to draw: the first, the last, and the extremes of each stretch.

    Every spike that would set the top or the bottom of a pixel column is kept.
    """
    if len(values) <= most:
        return list(range(len(values)))
    num_stretches = max(1, (most - 2) // 2)
    kept = {0, len(values) - 1}
    for stretch in range(num_stretches):
        start, stop = (len(values) * edge // num_stretches for edge in (stretch, stretch + 1))
        known = [(value, index) for index in range(start, stop) if (value := values[index]) is not None]
        kept |= {min(known)[1], max(known)[1]} if known else {start}  # a gap stays a gap
    return sorted(kept)


def evenly_spaced(count: int, most: int = MAX_ROWS) -> list[int]:
    """Return at most `most` evenly spaced indices, with the first and the last: the rows of a long table."""
    if count <= most:
        return list(range(count))
    return [round(step * (count - 1) / (most - 1)) for step in range(most)]


def smooth(values: Sequence[float | None], width: int) -> list[float | None]:
    """Return centred moving means over `width` points, fewer near the ends; None if all of them are missing."""
    sums = [0.0, *accumulate(0.0 if value is None else value for value in values)]
    counts = [0, *accumulate(int(value is not None) for value in values)]
    means: list[float | None] = []
    for index in range(len(values)):
        reach = min(width // 2, index, len(values) - 1 - index)
        start, stop = index - reach, index + reach + 1
        count = counts[stop] - counts[start]
        means.append((sums[stop] - sums[start]) / count if count else None)
    return means


def course_of(name: str, values: Sequence[float | None], *, is_percent: bool = False) -> str:
    """Describe the first and the last value of a series.

    >>> course_of("training loss", [2.3, None, 0.5])
    'training loss went from 2.3 to 0.5'
    """
    known = [value for value in values if value is not None]
    write = percent if is_percent else number
    if not known:
        return f"{name} has no finite value"
    if min(known) == max(known):
        return f"{name} is {write(known[0])}{' throughout' if len(known) > 1 else ''}"
    return f"{name} went from {write(known[0])} to {write(known[-1])}"


def sentence(*parts: str) -> str:
    """Join the non-empty parts into one sentence."""
    joined = "; ".join(part for part in parts if part)
    return f"{capitalized(joined)}." if joined else ""
