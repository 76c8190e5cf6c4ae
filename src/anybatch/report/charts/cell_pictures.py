"""A cell per row: what each row of an update counted for, as a small picture without a script."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

SIDE, GAP, ACROSS = 13, 3, 32
"""Pixels of a cell, between cells, and cells in a line."""
MOST = 256
"""Cells of one micro-batch that are drawn; more are told as a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCells:
    """The rows of one micro-batch."""

    label: str
    num_rows: int
    counted: float | None
    """What each row counted for against what it should: 1 is right, 0 is lost, None is unknown."""


def row_cells(lanes: Sequence[RowCells], *, title: str) -> Markup:
    """Micro-batches below each other, each cell coloured by what its row counted for, and said in words beside it."""
    parts, top = [], 0
    for lane in lanes:
        shown = min(lane.num_rows, MOST)
        lines = max(1, -(-shown // ACROSS))
        parts.append(f'<text x="0" y="{top + SIDE - 2}" class="label">{escape(lane.label)}</text>')
        for cell in range(shown):
            x, y = 120 + (cell % ACROSS) * (SIDE + GAP), top + (cell // ACROSS) * (SIDE + GAP)
            parts.append(
                f'<rect x="{x}" y="{y}" width="{SIDE}" height="{SIDE}" rx="2" class="{_class(lane.counted)}"/>'
            )
        more = f" and {lane.num_rows - shown:,} more" if lane.num_rows > shown else ""
        x = 120 + min(shown, ACROSS) * (SIDE + GAP) + 8
        parts.append(f'<text x="{x}" y="{top + SIDE - 2}" class="told">{escape(_told(lane.counted) + more)}</text>')
        top += lines * (SIDE + GAP) + 6
    width = 120 + ACROSS * (SIDE + GAP) + 220
    head = f'<svg class="cells" role="img" aria-label="{escape(title, quote=True)}" viewBox="0 0 {width} {max(top, SIDE)}">'
    return Markup(head + "".join(parts) + "</svg>")


def _class(counted: float | None) -> str:
    """How a cell looks: in proportion, too much, too little, not at all, unknown."""
    if counted is None:
        return "unknown"
    if abs(counted) < 1e-6:
        return "lost"
    return "right" if abs(counted - 1) < 0.02 else "more" if counted > 1 else "less"


def _told(counted: float | None) -> str:
    """What a row counted for, in words.

    >>> _told(1.0), _told(4.0), _told(0.25), _told(0.0), _told(None)
    ('counted once', 'counted 4 times', 'counted 0.25 times', 'never counted', 'not known')
    """
    if counted is None:
        return "not known"
    if abs(counted) < 1e-6:
        return "never counted"
    return "counted once" if abs(counted - 1) < 0.02 else f"counted {counted:.3g} times"
