"""A proof and a trace as charts, and the picture of what each row counted for."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from typing import NamedTuple

from markupsafe import Markup

from anybatch.app.records.schema import CutRecord, MicroBatchSeen, ParameterRecord, ProofRecord, Trace
from anybatch.app.report.chart import Chart, Series, Table, course_of, line_chart, sentence
from anybatch.app.report.writing import number, words
from anybatch.display import plural

MOST_NAMES, LONGEST_NAME = 12, 18
"""More parameters than this are not named on the axis, only in the table and where one points; letters of a name there."""
CHARTED = {"accumulate": re.compile(r"\bnorm\b"), "loss": re.compile(r"^(loss|share)$")}
"""The stages of a trace with numbers to chart, and patterns for the names of those facts."""
MOST = 256
"""Cells of one micro-batch that are drawn; more are told as a number."""
SIDE, GAP, ACROSS, LEFT = 13, 3, 32, 120
"""Pixels of a cell, between cells, cells in a line, and pixels left of them."""


def charts_of_proof(proof: ProofRecord) -> Iterator[Chart]:
    """One chart for each precision: errors as points, the floor as a line, on a logarithmic axis."""
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
    above = {p.name for cut in cuts for p in cut.parameters if p.error is None or p.error > (p.floor or 0.0)}
    is_within = "Every error is below its floor" if not above else f"{plural(len(above), 'parameter')} above the floor"
    chart = line_chart(
        f"proof-{precision}",
        series,
        title=f"Error of each parameter's gradient, {written}",
        caption=f"{is_within}. The floor is what another order of summation explains; an error of 0 is not drawn.",
        table=Table(
            ("parameter", "floor", *(cut.name for cut in cuts)),
            tuple(
                (name, number(floor), *(written_error(cut.parameters[row].error) for cut in cuts))
                for row, (name, floor) in enumerate(zip(names, floors, strict=True))
            ),
        ),
        x_title="parameter, in the model's order",
        height=380,
        is_wide=True,
    )
    short = [name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}" for name in names]
    named = {"title": "", "names": short} if len(names) <= MOST_NAMES else {}
    axes = {"x": chart.figure["x"] | named, "y": chart.figure["y"] | {"log": True}}
    return replace(chart, figure={**chart.figure, **axes}, has_log=False)


def cuts_table(proof: ProofRecord) -> Table:
    """Every cut in every precision, with the parameter whose error is the largest against its floor."""
    rows = []
    for cut in proof.cuts:
        worst = max(cut.parameters, key=_over_floor, default=None)
        verdict = "exact" if cut.is_exact else "failed" if cut.failure else "not exact"
        rows.append(
            (
                cut.name,
                written_precision(proof, cut.precision),
                number(cut.micro_batches),
                verdict if cut.decides else f"{verdict}, a note",
                written_error(cut.error),
                *(("", "", "") if worst is None else (worst.name, written_error(worst.error), number(worst.floor))),
            )
        )
    columns = ("cut", "precision", "micro-batches", "verdict", "error")
    failures = dict.fromkeys(f"{cut.name} failed: {cut.failure.rstrip('.')}." for cut in proof.cuts if cut.failure)
    return Table(
        (*columns, "largest against its floor", "its error", "its floor"),
        tuple(rows),
        " ".join(["Errors are |accumulated - whole| / |whole|.", *failures, *proof.notes]),
    )


def _over_floor(parameter: ParameterRecord) -> float:
    if parameter.error is None:
        return float("inf")
    return parameter.error / parameter.floor if parameter.floor else parameter.error


def proof_sentence(task: str, proof: ProofRecord) -> str:
    """The verdict in one sentence."""
    rows = plural(proof.rows or 0, "row")
    of_given = f" of {number(proof.rows_given)}" if proof.rows != proof.rows_given else ""
    if proof.unjudged:
        return (
            f"{task} could not be judged: {rows}{of_given} draw random numbers that cannot be drawn again row by row."
        )
    cuts = {cut.name for cut in proof.cuts if cut.decides}
    if proof.is_exact:
        given = f"in {plural(len(cuts), 'cut')}, {rows}{of_given} accumulated gave"
        return f"{task} is exact: {given} the gradient of all of them in one go."
    failed = {cut.name for cut in proof.cuts if cut.decides and not cut.is_exact}
    if not failed:
        return f"{task} is not exact: {proof.causes[0].explanation}"
    given = f"in {plural(len(failed), 'cut')}, {rows}{of_given} accumulated did not give"
    return f"{task} is not exact: {given} the gradient of all of them in one go."


def written_precision(proof: ProofRecord, precision: str) -> str:
    """The name of a precision: float64, or the model's own by its dtype."""
    return proof.dtype if precision == "own" else precision


def written_error(value: float | None) -> str:
    """An error to two digits."""
    return "not finite" if value is None else number(float(f"{value:.2g}"))


def charts_of_trace(trace: Trace) -> Iterator[Chart]:
    """The gradient norm as it grows, the losses and the shares: a chart each, where they change between micro-batches."""
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
        title=f"{written[:1].upper()}{written[1:]}, by micro-batch",
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
    """What each row counted for against what it should: 1 is right, 0 is lost, None is unknown."""
    note: str = ""
    """Said beside it in words."""


def weights_picture(proof: ProofRecord) -> Markup | None:
    """A cell per row: what each counted for in the accumulated gradient, beside what it should."""
    if not proof.weights:
        return None
    lanes = []
    for place, part in enumerate(proof.weights, start=1):
        should = "no weight is right" if part.wanted is None else f"should weigh {part.wanted:.3g}"
        note = "" if part.counted == 1 else f"weighs {part.weight or 0:.3g}, {should}"
        lanes.append(RowCells(f"micro-batch {place}", len(part.rows), part.counted, note))
    return row_cells(lanes, title="What each row counted for, beside what it should")


def shares_picture(parts: Sequence[MicroBatchSeen], *, title: str) -> Markup | None:
    """A cell per row of an update: each counts once where the shares are in proportion to the units."""
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
    """Micro-batches below each other. A cell is a row and should be full: what it counted for fills it, in shape and colour.

    Once is full, too little is a low cell, too much has a cross on it, not at all is empty; each is said in words too.
    """
    parts, top = [], 0
    for lane in lanes:
        shown = min(lane.num_rows, MOST)
        look, told = _look(lane.counted)
        parts.append(f'<text x="0" y="{top + SIDE - 2}" class="label">{escape(lane.label)}</text>')
        for cell in range(shown):
            x, y = LEFT + (cell % ACROSS) * (SIDE + GAP), top + (cell // ACROSS) * (SIDE + GAP)
            parts.append(_cell(x, y, look, lane.counted))
        told += f" and {lane.num_rows - shown:,} more" if lane.num_rows > shown else ""
        told += f"; {lane.note}" if lane.note else ""
        x = LEFT + min(shown, ACROSS) * (SIDE + GAP) + 8
        parts.append(f'<text x="{x}" y="{top + SIDE - 2}" class="told">{escape(told)}</text>')
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
    """How a cell looks, and what its row counted for in words.

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
