"""A chart: Plotly's figure, the keys to its colours, a sentence that says what it shows, and its numbers as a table.

Colours are the names of CSS custom properties (`--series-1`): the page's script puts in what they mean, in light or dark.
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from anybatch.report.charts.thinning import thin
from anybatch.report.writing import number, percent

SeriesKind = Literal["line", "faint", "points", "area"]
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x")
NUM_COLOURS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Columns and rows of text; the first column names the row."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    """What the rows leave out, if they do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One entry of the legend: a button that shows and hides every trace of its group."""

    name: str
    colour: str
    dash: str = "solid"
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One figure of the page."""

    name: str
    """Its place in the page: the id of the element."""
    title: str
    caption: str
    """One or two sentences that say what is to be seen: the caption, and the text alternative."""
    figure: Mapping[str, Any]
    """`data` and `layout` are what Plotly draws. `stops` says what the arrow keys move along, "x" or "bars". `where` has the
    words before and after a place on the x axis."""
    keys: tuple[Key, ...]
    table: Table
    height: int = 300
    is_wide: bool = False
    has_log: bool = False
    """Whether a logarithmic axis makes sense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a chart, with a band around it where it is a mean."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: int = 1
    """Which colour of the palette, from 1."""
    dash: int = 0
    kind: SeriesKind = "line"
    deviation: Sequence[float | None] = ()
    """Half the height of the band at each point; none where it is None."""
    labels: Sequence[str] = ()
    """What to say at each point besides its value."""


def line_chart(
    name: str,
    series: Sequence[Series],
    *,
    title: str,
    caption: str,
    table: Table,
    x_title: str,
    x_unit: str = "",
    is_percent: bool = False,
    unit: str = "",
    from_zero: bool = False,
    height: int = 300,
    is_wide: bool = False,
) -> Chart:
    """Lines over a common axis; each is thinned on its own. With `is_percent` the values are shares of one."""
    if is_percent:
        series, unit = [_in_percent(line) for line in series], " %"
    values = [value for line in series for value in line.y if value is not None]
    is_positive = bool(values) and min(values) > 0
    data: list[dict[str, Any]] = []
    for group, line in enumerate(series):
        if any(half is not None for half in line.deviation):
            data.append(_band(line, group))
        data.append(_trace(line, group, is_percent=is_percent, unit=unit))
    y_axis: dict[str, Any] = axis(ticksuffix=unit)
    if from_zero:
        y_axis |= {"rangemode": "tozero"}
    x_axis = axis(title=x_title, showgrid=False, **_whole_ticks(series))
    return Chart(
        name=name,
        title=title,
        caption=caption,
        figure={
            "data": data,
            "layout": layout(height, xaxis=x_axis, yaxis=y_axis),
            "stops": "x",
            "where": ["", f" {x_unit}"] if x_unit else [f"{x_title} ", ""],
        },
        keys=tuple(
            Key(name=line.name, colour=colour(line), dash="dots" if line.kind == "points" else DASHES[line.dash % 6])
            for line in series
        ),
        table=table,
        height=height,
        is_wide=is_wide,
        has_log=is_positive and not is_percent and not from_zero and max(values) > 3 * min(values),
    )


def layout(height: int, **more: Any) -> dict[str, Any]:
    """What all charts have in common."""
    return {
        "height": height,
        "margin": {"l": 4, "r": 10, "t": 10, "b": 4},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "--sans", "size": 12, "color": "--soft"},
        "showlegend": False,
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": "--paper", "bordercolor": "--rule", "font": {"color": "--ink", "size": 12}},
        "uirevision": "kept",
        **more,
    }


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    """A calm axis that makes room for its own labels."""
    return {
        "title": {"text": escaped(title), "standoff": 10},
        "automargin": True,
        "gridcolor": "--grid",
        "linecolor": "--rule",
        "zeroline": False,
        "ticks": "",
        **more,
    }


def colour(line: Series) -> str:
    """The name of the line's colour."""
    return f"--{'faint' if line.kind == 'faint' else 'series'}-{(line.colour - 1) % NUM_COLOURS + 1}"


def escaped(text: str) -> str:
    """Text that Plotly shows as it stands, instead of reading tags in it."""
    return html.escape(text, quote=False)


def six_digits(value: float | None) -> float | None:
    """Six significant digits: more than any screen shows, and half the bytes."""
    return None if value is None else float(f"{value:.6g}")


def course_of(name: str, values: Sequence[float | None], *, is_percent: bool = False) -> str:
    """How a series went, in words.

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


def sentence(parts: Sequence[str]) -> str:
    """Parts joined into one sentence with a capital letter and a full stop."""
    joined = "; ".join(part for part in parts if part)
    return joined[:1].upper() + joined[1:] + "." if joined else ""


def _in_percent(line: Series) -> Series:
    y, deviation = ([None if part is None else 100 * part for part in parts] for parts in (line.y, line.deviation))
    return replace(line, y=y, deviation=deviation)


def _trace(line: Series, group: int, *, is_percent: bool, unit: str) -> dict[str, Any]:
    kept = thin(line.y)
    shade = colour(line)
    value = f"%{{y:{'.1f' if is_percent else '.4~g'}}}{unit}"
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers" if line.kind == "points" else "lines+markers" if len(kept) <= 40 else "lines",
        "name": escaped(line.name),
        "x": [six_digits(line.x[index]) for index in kept],
        "y": [six_digits(line.y[index]) for index in kept],
        "line": {
            "color": shade,
            "width": 1.2 if line.kind == "faint" else 2.2,
            "dash": DASHES[line.dash % len(DASHES)],
        },
        "marker": {"color": shade, "size": 6, "symbol": SYMBOLS[line.dash % len(SYMBOLS)]},
        "hovertemplate": f"{escaped(line.name)} <b>{value}</b><extra></extra>",
        "meta": {"group": group, "percent": is_percent, "unit": unit},
    }
    if line.kind == "faint":
        trace["mode"] = "lines"
    if line.kind == "points":
        trace["marker"] |= {"symbol": "x", "size": 9}
    if line.kind == "area":
        trace |= {"fill": "tozeroy", "fillcolor": f"--band-{line.colour}"}
    if line.labels:
        trace["customdata"] = [escaped(line.labels[index]) for index in kept]
        trace["hovertemplate"] = f"%{{customdata}} <b>{value}</b><extra></extra>"
    return trace


def _band(line: Series, group: int) -> dict[str, Any]:
    edges = [
        (x, middle - half, middle + half)
        for x, middle, half in zip(line.x, line.y, line.deviation, strict=True)
        if middle is not None and half is not None
    ]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": escaped(line.name),
        "x": [six_digits(x) for x, _, _ in edges] + [six_digits(x) for x, _, _ in reversed(edges)],
        "y": [six_digits(high) for _, _, high in edges] + [six_digits(low) for _, low, _ in reversed(edges)],
        "fill": "toself",
        "fillcolor": f"--band-{(line.colour - 1) % NUM_COLOURS + 1}",
        "line": {"width": 0, "color": colour(line)},
        "hoverinfo": "skip",
        "meta": {"group": group, "silent": True},
    }


def _whole_ticks(series: Sequence[Series]) -> dict[str, Any]:
    places = {x for line in series for x in line.x}
    if not places or any(x != int(x) for x in places):
        return {}
    return {"tickformat": ",d", **({"dtick": 1} if max(places) - min(places) <= 10 else {})}
