"""A cell per row: what each row of an update counted for beside what it should, as a small picture without a script."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from anybatch.records import MicroBatchSeen

SIDE, GAP, ACROSS = 13, 3, 32
"""Pixels of a cell, between cells, and cells in a line."""
MOST = 256
"""Cells of one micro-batch that are drawn; more are told as a number."""
LEFT = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCells:
    """The rows of one micro-batch."""

    label: str
    num_rows: int
    counted: float | None
    """What each row counted for against what it should: 1 is right, 0 is lost, None is unknown."""
    note: str = ""
    """What is said beside it in words."""


def row_cells(lanes: Sequence[RowCells], *, title: str) -> Markup:
    """Micro-batches below each other. A cell is a row and should be full: what it counted for fills it, in shape and colour.

    Once is full, too little is a low cell, too much has a cross on it, not at all is empty; each is said in words too.
    """
    parts, top = [], 0
    for lane in lanes:
        shown = min(lane.num_rows, MOST)
        lines = max(1, -(-shown // ACROSS))
        parts.append(f'<text x="0" y="{top + SIDE - 2}" class="label">{escape(lane.label)}</text>')
        for cell in range(shown):
            x, y = LEFT + (cell % ACROSS) * (SIDE + GAP), top + (cell // ACROSS) * (SIDE + GAP)
            parts.append(_cell(x, y, lane.counted))
        more = f" and {lane.num_rows - shown:,} more" if lane.num_rows > shown else ""
        note = f"; {lane.note}" if lane.note else ""
        x = LEFT + min(shown, ACROSS) * (SIDE + GAP) + 8
        parts.append(
            f'<text x="{x}" y="{top + SIDE - 2}" class="told">{escape(_told(lane.counted) + more + note)}</text>'
        )
        top += lines * (SIDE + GAP) + 6
    across = max((min(lane.num_rows, ACROSS) for lane in lanes), default=ACROSS)
    width = LEFT + across * (SIDE + GAP) + (340 if any(lane.note for lane in lanes) else 220)
    size = f'width="{width}" height="{max(top, SIDE)}" viewBox="0 0 {width} {max(top, SIDE)}"'
    head = f'<svg class="cells" role="img" aria-label="{escape(title, quote=True)}" {size}>'
    return Markup(head + "".join(parts) + "</svg>")


def shares_picture(parts: Sequence[MicroBatchSeen], *, title: str) -> Markup | None:
    """A cell per row of an update: each counts once where the shares are in proportion to the units."""
    shares, units = sum(part.share for part in parts), sum(part.units for part in parts)
    if not shares or not units:
        return None
    is_sum = all(part.share == 1 for part in parts)
    lanes = []
    for place, part in enumerate(parts):
        counted = 1.0 if is_sum else part.share * units / (part.units * shares) if part.units else None
        lanes.append(
            RowCells(
                label=f"micro-batch {place}",
                num_rows=part.rows,
                counted=counted,
                note=f"{part.units:,g} of {units:,g} units, share {part.share:.3g}",
            )
        )
    return row_cells(lanes, title=title)


def _cell(x: int, y: int, counted: float | None) -> str:
    look = _class(counted)
    box = f'<rect x="{x}" y="{y}" width="{SIDE}" height="{SIDE}" rx="2" class="{look}"/>'
    if look == "more":
        middle = SIDE / 2
        return f'{box}<path class="mark" d="M{x + 3} {y + middle}h{SIDE - 6}M{x + middle} {y + 3}v{SIDE - 6}"/>'
    if look == "less":
        height = SIDE * min(max(counted or 0.0, 0.25), 0.8)
        low = f'<rect x="{x}" y="{y + SIDE - height:.1f}" width="{SIDE}" height="{height:.1f}" rx="2" class="less"/>'
        return f'<rect x="{x}" y="{y}" width="{SIDE}" height="{SIDE}" rx="2" class="should"/>{low}'
    return box


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
