"""The pages of the doctor and of the self-test, made from the JSON object that each command prints or writes."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from markupsafe import Markup

from anybatch.app.report.page import asset, page_environment, write_whole
from anybatch.app.report.proof_charts import RowCells, row_cells

NUM_UPDATES = 4
"""Updates that are drawn."""
CONTEXT = 4
"""Lines of code above and below a finding."""
STEP, LANE, LEFT = 26, 26, 130
"""Pixels between events, between lanes, and of the labels."""
LETTERS = {"clip": "clip", "step": "step", "schedule": "lr", "zero": "zero", "unscale": "1/s", "scaler-update": "s"}

Json = Mapping[str, Any]


def write_doctor_page(diagnosis: Json, page: Path) -> Path:
    """Write the page of the object that `anybatch doctor --json` prints; it loads nothing from elsewhere."""
    return write_whole(page, render_doctor(diagnosis))


def render_doctor(diagnosis: Json) -> str:
    """Return the page as HTML; text of the script and of its log is escaped."""
    findings = [{**finding, "code": _code(finding["file"], finding["line"])} for finding in diagnosis["findings"]]
    counts = {kind: sum(one["severity"] == kind for one in findings) for kind in ("error", "warning", "note")}
    lost = [RowCells(f"pass {one['serial'] + 1}", int(one["rows"] or 1), 0.0) for one in diagnosis.get("lost", [])[:12]]
    template = page_environment().get_template("doctor.html")
    return template.render(
        findings=findings,
        counts=counts,
        timeline=_timeline(diagnosis.get("timeline", [])),
        updates=[{**update, "cells": _cells(update)} for update in diagnosis["updates"][:NUM_UPDATES]],
        lost=row_cells(lost, title="Rows that no step used") if lost else None,
        num_updates=len(diagnosis["updates"]),
        style=asset("page.css", "doctor.css"),
    )


def _cells(update: Json) -> Markup:
    parts: Sequence[Json] = update["micro_batches"]
    terms = sum(part["terms"] or 0 for part in parts)
    lanes = []
    for place, part in enumerate(parts, start=1):
        is_known = part["weight"] is not None and part["terms"] and terms
        counted = part["weight"] / part["terms"] * terms if is_known else None
        lanes.append(RowCells(f"micro-batch {place}", int(part["rows"] or part["terms"] or 1), counted))
    return row_cells(lanes, title=f"What each row of update {update['update']} counted for")


def _timeline(events: Sequence[Json]) -> Markup:
    """Draw events from left to right: backward passes in a lane per micro-batch, all others in a lane below."""
    num_lanes = max((event["lane"] for event in events if event["what"] == "backward"), default=0) + 1
    below = num_lanes * LANE
    labels = [*(f"micro-batch {lane + 1}" for lane in range(num_lanes)), "optimizer"]
    parts = [f'<text x="0" y="{lane * LANE + 17}" class="label">{label}</text>' for lane, label in enumerate(labels)]
    for place, event in enumerate(events):
        x = LEFT + place * STEP
        parts.append(_event(event, x, below))
        if event["what"] == "step":
            parts.append(f'<line x1="{x + STEP - 1}" x2="{x + STEP - 1}" y1="0" y2="{below + LANE}"/>')
    label = "Backward passes, clipping, steps, schedules and clearings of the first updates"
    size = f'width="{LEFT + len(events) * STEP + 10}" height="{below + LANE + 4}"'
    return Markup(f'<svg class="timeline" role="img" aria-label="{label}" {size}>{"".join(parts)}</svg>')


def _event(event: Json, x: int, below: int) -> str:
    what = str(event["what"])
    if what == "backward":
        look, y = "backward" if event["is_used"] else "backward lost", event["lane"] * LANE
        text = "" if event["weight"] is None else f"{event['weight']:.2g}"
    else:
        look, y, text = what, below, LETTERS.get(what, what)
    title = escape(f"{what}, line {event['line']}", quote=True)
    box = f'<rect x="{x}" y="{y + 2}" width="{STEP - 3}" height="{LANE - 6}" rx="4"/>'
    word = f'<text x="{x + (STEP - 3) / 2}" y="{y + 16}">{escape(text)}</text>'
    return f'<g class="{escape(look, quote=True)}"><title>{title}</title>{box}{word}</g>'


def _code(file: str, line: int) -> list[tuple[int, str, bool]]:
    """Return (number, text, is the finding's) of the lines around a finding; none if the file cannot be read."""
    try:
        lines = Path(file).read_text(errors="replace").splitlines() if file else []
    except OSError:
        return []
    first = max(1, line - CONTEXT)
    shown = lines[first - 1 : line + CONTEXT] if 0 < line <= len(lines) else []
    return [(number, text[:200], number == line) for number, text in enumerate(shown, start=first)]


def write_self_test_page(found: Json, page: Path) -> Path:
    """Write the page of the object in `self-test.json`; it loads nothing from elsewhere."""
    groups: dict[str, list[Any]] = {}
    for check in found["checks"]:
        groups.setdefault(check["group"], []).append(check)
    failed = sum(not check["has_passed"] for check in found["checks"])
    template = page_environment().get_template("self_test.html")
    return write_whole(page, template.render(found=found, groups=groups, failed=failed, style=asset("page.css")))
