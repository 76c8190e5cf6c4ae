"""Charts of a verification and of a trace, and the picture that shows the weight of each row."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from typing import NamedTuple

from markupsafe import Markup

from anybatch.app.records.schema import CutRecord, MicroBatchSeen, ParameterRecord, ProofRecord, Trace
from anybatch.app.report.chart import Chart, Series, Table, course_of, line_chart, sentence
from anybatch.app.report.writing import capitalized, number, words
from anybatch.display import plural

MAX_NAMES, LONGEST_NAME = 12, 18
"""Most parameters that are named on the axis, and the letters of such a name."""
CHARTED = {"accumulate": re.compile(r"\bnorm\b"), "loss": re.compile(r"^(loss|share)$")}
"""Stages of a trace with numbers to chart, and a pattern for the names of those facts."""
MAX_CELLS = 256
"""Cells of one micro-batch that are drawn; the rest is given as a number."""
SIDE, GAP, ACROSS, LEFT = 13, 3, 32, 120
"""Pixels of a cell and between cells, cells in a line, pixels left of them."""


def charts_of_proof(proof: ProofRecord) -> Iterator[Chart]:
    """Chart each precision on a logarithmic axis: errors as points, the floor as a line."""
    for precision in dict.fromkeys(cut.precision for cut in proof.cuts):
        cuts = [cut for cut in proof.cuts if cut.precision == precision and cut.parameters]
        if cuts:
            yield _chart(precision, written_precision(proof, precision), cuts)


def _chart(precision: str, written: str, cuts: list[CutRecord]) -> Chart:
    names = [parameter.name for parameter in cuts[0].parameters]
    places = list(range(1, len(names) + 1))
    floors = [max((cut.parameters[place - 1].floor or 0.0) for cut in cuts) or None for place in places]
    series = [Series("floor", places, floors, colour=2, dash=1, labels=[f"{name}: floor" for name in names])]
    for index, cut in enumerate(cuts):
        errors = [parameter.error or None for parameter in cut.parameters]
        labels = [f"{name}: {cut.name}" for name in names]
        look = (0, 2, 3, 4, 5)[index % 5]  # the floor has the squares
        series.append(Series(cut.name, places, errors, index + 2 if index else 1, look, "points", labels=labels))
    rows = [
        (name, number(floor), *(written_error(cut.parameters[row].error) for cut in cuts))
        for row, (name, floor) in enumerate(zip(names, floors, strict=True))
    ]
    above = {p.name for cut in cuts for p in cut.parameters if p.error is None or p.error > (p.floor or 0.0)}
    is_within = "Every error is below its floor" if not above else f"{plural(len(above), 'parameter')} above the floor"
    chart = line_chart(
        f"proof-{precision}",
        series,
        title=f"Error of each parameter's gradient, {written}",
        caption=f"{is_within}. The floor is what another order of summation explains; an error of 0 is not drawn.",
        table=Table(("parameter", "floor", *(cut.name for cut in cuts)), tuple(rows)),
        x_title="parameter, in the model's order",
        height=380,
        is_wide=True,
    )
    short = [name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}" for name in names]
    named = {"title": "", "names": short} if len(names) <= MAX_NAMES else {}
    axes = {"x": chart.figure["x"] | named, "y": chart.figure["y"] | {"log": True}}
    return replace(chart, figure={**chart.figure, **axes}, has_log=False)


def cuts_table(proof: ProofRecord) -> Table:
    """Tabulate every cut in every precision, with the parameter that is worst relative to its floor."""
    rows = []
    for cut in proof.cuts:
        worst = max(cut.parameters, key=_over_floor, default=None)
        verdict = "exact" if cut.is_exact else "failed" if cut.failure else "not exact"
        cells = [cut.name, written_precision(proof, cut.precision), number(cut.micro_batches)]
        cells += [verdict if cut.decides else f"{verdict}, a note", written_error(cut.error)]
        cells += ["", "", ""] if worst is None else [worst.name, written_error(worst.error), number(worst.floor)]
        rows.append(tuple(cells))
    columns = ("cut", "precision", "micro-batches", "verdict", "error")
    failures = dict.fromkeys(f"{cut.name} failed: {cut.failure.rstrip('.')}." for cut in proof.cuts if cut.failure)
    note = " ".join(["Errors are |accumulated - whole| / |whole|.", *failures, *proof.notes])
    return Table((*columns, "largest against its floor", "its error", "its floor"), tuple(rows), note)


def _over_floor(parameter: ParameterRecord) -> float:
    if parameter.error is None:
        return float("inf")
    return parameter.error / parameter.floor if parameter.floor else parameter.error


def proof_sentence(task: str, proof: ProofRecord) -> str:
    """Write the verdict in one sentence."""
    rows = plural(proof.rows or 0, "row")
    of_given = f" of {number(proof.rows_given)}" if proof.rows != proof.rows_given else ""
    if proof.unjudged:
        return (
            f"{task} could not be judged: {rows}{of_given} draw random numbers that cannot be drawn again row by row."
        )
    names = {cut.name for cut in proof.cuts if cut.decides and (proof.is_exact or not cut.is_exact)}
    if not proof.is_exact and not names:
        return f"{task} is not exact: {proof.causes[0].explanation}"
    verdict, gave = ("exact", "gave") if proof.is_exact else ("not exact", "did not give")
    cuts = f"in {plural(len(names), 'cut')}, {rows}{of_given}"
    return f"{task} is {verdict}: {cuts} accumulated {gave} the gradient of all of them in one go."


def written_precision(proof: ProofRecord, precision: str) -> str:
    """Name a precision: the model's dtype for "own", else the precision itself."""
    return proof.dtype if precision == "own" else precision


def written_error(value: float | None) -> str:
    """Write an error to two digits."""
    return "not finite" if value is None else number(float(f"{value:.2g}"))


def charts_of_trace(trace: Trace) -> Iterator[Chart]:
    """Chart the growing gradient norm, the losses and the shares, if they change between micro-batches."""
    place = 0
    for stage, pattern in CHARTED.items():
        entries = [entry for entry in trace.stages if entry.stage == stage]
        for name in dict.fromkeys(name for entry in entries for name in entry.facts):
            if not pattern.search(words(name)):
                continue
            place += 1
            points: dict[int, float] = {}
            for entry in entries:
                value = entry.facts.get(name)
                if entry.micro_batch is not None and isinstance(value, int | float) and not isinstance(value, bool):
                    points[entry.micro_batch] = value
            if len(set(points.values())) > 1:
                yield _trace_chart(place, name, dict(sorted(points.items())))


def _trace_chart(place: int, name: str, points: dict[int, float]) -> Chart:
    written, values = words(name), list(points.values())
    return line_chart(
        f"trace-{place}",
        [Series(written, list(points), values, colour=place)],
        title=f"{capitalized(written)}, by micro-batch",
        caption=sentence(course_of(written, values)),
        table=Table(("micro-batch", written), tuple((number(x), number(y)) for x, y in points.items())),
        x_title="micro-batch",
        from_zero=min(values) >= 0,
        height=260,
    )


class RowCells(NamedTuple):
    """The rows of one micro-batch."""

    label: str
    num_rows: int
    counted: float | None
    """Weight of each row relative to its right weight: 1 is right, 0 is lost, None is unknown."""
    note: str = ""


def weights_picture(proof: ProofRecord) -> Markup | None:
    """Draw a cell per row of a verified batch: its weight in the accumulated gradient."""
    if not proof.weights:
        return None
    lanes = []
    for place, part in enumerate(proof.weights, start=1):
        should = "no weight is right" if part.wanted is None else f"should weigh {part.wanted:.3g}"
        note = "" if part.counted == 1 else f"weighs {part.weight or 0:.3g}, {should}"
        lanes.append(RowCells(f"micro-batch {place}", len(part.rows), part.counted, note))
    return row_cells(lanes, title="What each row counted for, beside what it should")


def shares_picture(parts: Sequence[MicroBatchSeen], *, title: str) -> Markup | None:
    """Draw a cell per row of an update; each counts once if the shares are proportional to the units."""
    shares, units = sum(part.share for part in parts), sum(part.units for part in parts)
    if not shares or not units:
        return None
    is_sum = all(part.share == 1 for part in parts)
    lanes = []
    for place, part in enumerate(parts):
        counted = 1.0 if is_sum else part.share * units / (part.units * shares) if part.units else None
        note = f"{part.units:,g} of {units:,g} units, share {part.share:.3g}"
        lanes.append(RowCells(f"micro-batch {place}", part.rows, counted, note))
    return row_cells(lanes, title=title)


def row_cells(lanes: Sequence[RowCells], *, title: str) -> Markup:
    """Draw the rows of micro-batches as cells, with the weight in words after them.

    A row that counts once is a full cell; too little is a low cell, too much has a cross, not at all is empty.
    """
    parts, top = [], 0
    for lane in lanes:
        shown = min(lane.num_rows, MAX_CELLS)
        look, text = _look(lane.counted)
        parts.append(f'<text x="0" y="{top + SIDE - 2}" class="label">{escape(lane.label)}</text>')
        for cell in range(shown):
            x, y = LEFT + (cell % ACROSS) * (SIDE + GAP), top + (cell // ACROSS) * (SIDE + GAP)
            parts.append(_cell(x, y, look, lane.counted))
        text += f" and {lane.num_rows - shown:,} more" if lane.num_rows > shown else ""
        text += f"; {lane.note}" if lane.note else ""
        x = LEFT + min(shown, ACROSS) * (SIDE + GAP) + 8
        parts.append(f'<text x="{x}" y="{top + SIDE - 2}" class="told">{escape(text)}</text>')
        top += max(1, -(-shown // ACROSS)) * (SIDE + GAP) + 6
    across = max((min(lane.num_rows, ACROSS) for lane in lanes), default=ACROSS)
    width = LEFT + across * (SIDE + GAP) + (340 if any(lane.note for lane in lanes) else 220)
    size = f'width="{width}" height="{max(top, SIDE)}" viewBox="0 0 {width} {max(top, SIDE)}"'
    head = f'<svg class="cells" role="img" aria-label="{escape(title, quote=True)}" {size}>'
    return Markup(head + "".join(parts) + "</svg>")


def _cell(x: int, y: int, look: str, counted: float | None) -> str:
    def box(kind: str) -> str:
        return f'<rect x="{x}" y="{y}" width="{SIDE}" height="{SIDE}" rx="2" class="{kind}"/>'

    if look == "more":
        middle = SIDE / 2
        return f'{box(look)}<path class="mark" d="M{x + 3} {y + middle}h{SIDE - 6}M{x + middle} {y + 3}v{SIDE - 6}"/>'
    if look == "less":
        height = SIDE * min(max(counted or 0.0, 0.25), 0.8)
        low = f'<rect x="{x}" y="{y + SIDE - height:.1f}" width="{SIDE}" height="{height:.1f}" rx="2" class="less"/>'
        return box("should") + low
    return box(look)


def _look(counted: float | None) -> tuple[str, str]:
    """Return the CSS class of a cell, and the weight of its row in words.

    >>> [_look(counted)[1] for counted in (1.0, 4.0, 0.25, 0.0, None)]
    ['counted once', 'counted 4 times', 'counted 0.25 times', 'never counted', 'not known']
    """
    if counted is None:
        return "unknown", "not known"
    if abs(counted) < 1e-6:
        return "lost", "never counted"
    if abs(counted - 1) < 0.02:
        return "right", "counted once"
    return "more" if counted > 1 else "less", f"counted {counted:.3g} times"
