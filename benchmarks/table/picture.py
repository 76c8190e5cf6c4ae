"""The table as a picture: green is exact, the redder the further off."""

import math
from collections.abc import Mapping
from html import escape

from benchmarks.table.collect import Cell
from benchmarks.table.judge import Outcome
from benchmarks.table.pages import figure, remarks

LEFT, TOP, WIDE, HIGH, GAP = 252, 104, 140, 60, 4
EXACT, EMPTY = "#1a7f5a", "#f1f1ef"
WARM = ["#f6e3a1", "#f3c66b", "#ec9a4c", "#dd6a3f", "#c33c3a"]
"""From an error just above what rounding explains to one as large as the gradient."""


def draw(table: Mapping[str, Mapping[str, Cell]], versions: Mapping[str, str], day: str) -> str:
    """An SVG of every cell."""
    columns = list(next(iter(table.values())))
    width, height = LEFT + len(columns) * (WIDE + GAP) + 16, TOP + len(table) * (HIGH + GAP) + 48
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        "<style>text{font-family:system-ui,sans-serif;font-size:12px;fill:#222}.head{font-weight:600;font-size:12px}"
        ".title{font-weight:600;font-size:17px}.error{font-weight:600;font-size:15px}.small{font-size:10.5px}"
        ".light{fill:#fff}.grey{fill:#777}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        '<text x="16" y="30" class="title">The gradient that the optimizer is handed, against the whole batch</text>',
        '<text x="16" y="52" class="grey">largest |g - g_ref| / |g_ref| over all updates; g_ref: the whole batch at once, '
        "in float64</text>",
    ]
    for number, column in enumerate(columns):
        x = LEFT + number * (WIDE + GAP) + WIDE / 2
        parts.append(f'<text x="{x}" y="{TOP - 12}" text-anchor="middle" class="head">{escape(column)}</text>')
    for line, (case, cells) in enumerate(table.items()):
        y = TOP + line * (HIGH + GAP)
        parts.append(f'<text x="16" y="{y + HIGH / 2 + 4}">{escape(case)}</text>')
        for number, column in enumerate(columns):
            parts += _cell(LEFT + number * (WIDE + GAP), y, cells[column])
    named = ", ".join(f"{package} {version}" for package, version in versions.items())
    parts.append(f'<text x="16" y="{height - 18}" class="small grey">{escape(f"{day}, CPU: {named}")}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _cell(x: float, y: float, cell: Cell) -> list[str]:
    colour = colour_of(cell)
    middle, shade = x + WIDE / 2, " light" if colour in (EXACT, *WARM[3:]) else ""
    box = f'<rect x="{x}" y="{y}" width="{WIDE}" height="{HIGH}" rx="5" fill="{colour}"/>'
    if isinstance(cell, str):
        lines = [("small grey", part) for part in _wrapped(cell)]
    else:
        said = [("small" + shade, part) for remark in remarks(cell) for part in _wrapped(remark)]
        lines = [("error" + shade, figure(cell.error)), *said]
    start = y + HIGH / 2 + 4 - 6.5 * (len(lines) - 1)
    return [
        box,
        *(
            f'<text x="{middle}" y="{start + 13.5 * index}" text-anchor="middle" class="{style}">{escape(text)}</text>'
            for index, (style, text) in enumerate(lines)
        ),
    ]


def colour_of(cell: Cell) -> str:
    """Green if exact in every respect; else by the error, and never less than half way where rows or updates are lost."""
    if isinstance(cell, str):
        return EMPTY
    if cell.is_exact:
        return EXACT
    return WARM[max(_step_by_error(cell), 2 if _has_lost(cell) else 0)]


def _step_by_error(cell: Outcome) -> int:
    if cell.error is None:
        return len(WARM) - 1
    decades = math.log10(max(cell.error, 1e-9) / 3e-3)
    return min(max(round(decades * (len(WARM) - 1) / math.log10(0.5 / 3e-3)), 0), len(WARM) - 1)


def _has_lost(cell: Outcome) -> bool:
    is_lr_right = abs(cell.lr - cell.wanted_lr) < 1e-9
    return bool(
        cell.dropped or cell.repeated or cell.nonfinite or cell.updates != cell.wanted_updates or not is_lr_right
    )


def _wrapped(text: str, columns: int = 24) -> list[str]:
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= columns:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
