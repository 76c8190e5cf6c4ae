"""Charts of horizontal bars in lanes."""

from collections.abc import Sequence
from typing import Any

from anybatch.report.charts.chart import Chart, Key, Table, axis, escaped, layout, six_digits


def bar_chart(
    name: str,
    bars: Sequence[dict[str, Any]],
    lanes: Sequence[str],
    *,
    title: str,
    caption: str,
    keys: Sequence[Key],
    table: Table,
    x_title: str,
    height: int,
    is_wide: bool = False,
) -> Chart:
    """Horizontal bars, made by `bars_of`, in `lanes` from top to bottom."""
    rows = list(reversed([escaped(lane) for lane in lanes]))
    y_axis = axis(type="category", categoryorder="array", categoryarray=rows, showgrid=False, fixedrange=True)
    x_axis = axis(title=x_title, rangemode="tozero")
    shape = layout(height, barmode="overlay", bargap=0.3, hovermode="closest", xaxis=x_axis, yaxis=y_axis)
    return Chart(
        name=name,
        title=title,
        caption=caption,
        figure={"data": list(bars), "layout": shape, "stops": "bars", "where": ["", ""]},
        keys=tuple(keys),
        table=table,
        height=height,
        is_wide=is_wide,
    )


def bars_of(
    name: str, lanes: Sequence[str], x: Sequence[float], texts: Sequence[str], *, colour: str, group: int, unit: str
) -> dict[str, Any]:
    """The bars of one key: each as long as its `x`, in its lane, read out as its text."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": escaped(name),
        "x": [six_digits(value) for value in x],
        "y": [escaped(lane) for lane in lanes],
        "customdata": list(texts),
        "marker": {"color": colour, "line": {"width": 0}},
        "hovertemplate": "%{y} <b>%{customdata}</b><extra></extra>",
        "meta": {"group": group, "percent": False, "unit": f" {unit}"},
    }
