"""Charts of horizontal bars in lanes."""

from collections.abc import Sequence
from typing import Any

from anybatch.report.charts.chart import Chart, Key, Table, six_digits


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
    return Chart(
        name=name,
        title=title,
        caption=caption,
        figure={
            "data": list(bars),
            "x": {"title": x_title, "whole": False},
            "y": {"unit": "", "zero": True, "lanes": list(lanes)},
            "stops": "bars",
            "where": ["", ""],
        },
        keys=tuple(keys),
        table=table,
        height=height,
        is_wide=is_wide,
    )


def bars_of(
    name: str,
    lanes: Sequence[str],
    x: Sequence[float],
    texts: Sequence[str],
    *,
    colour: str,
    group: int,
    starts: Sequence[float] = (),
) -> dict[str, Any]:
    """The bars of one key: each as long as its `x` from its start on, 0 if none is given, in its lane, read out as its text."""
    return {
        "kind": "bars",
        "name": name,
        "group": group,
        "colour": colour,
        "x": [six_digits(value) for value in x],
        "starts": [six_digits(value) for value in starts] or [0] * len(x),
        "lanes": list(lanes),
        "texts": list(texts),
    }
