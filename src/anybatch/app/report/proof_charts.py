"""A proof and a trace as charts, and the picture of what each row counted for."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

from markupsafe import Markup

from anybatch.app.records.schema import CutRecord, MicroBatchSeen, ParameterRecord, ProofRecord, Trace
from anybatch.app.report.chart import Chart, Series, Table, course_of, line_chart, sentence
from anybatch.app.report.writing import number, plural, sentence_case, words

MOST = 256
"""Cells of one micro-batch that are drawn; more are told as a number."""


LEFT = 120


MOST_NAMES = 12
"""More parameters than this are not named on the axis, only in the table and where one points."""


LONGEST_NAME = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCells:
    """The rows of one micro-batch."""

    label: str
    num_rows: int
    counted: float | None
    """What each row counted for against what it should: 1 is right, 0 is lost, None is unknown."""
    note: str = ""
    """What is said beside it in words."""


def charts_of_proof(proof: ProofRecord) -> Iterator[Chart]:
    """One chart for each precision: errors as points, the floor as a line, on a logarithmic axis."""
    for precision in dict.fromkeys(cut.precision for cut in proof.cuts):
        cuts = [cut for cut in proof.cuts if cut.precision == precision and cut.parameters]
        if cuts:
            yield _chart(precision, written_precision(proof, precision), cuts)


def cuts_table(proof: ProofRecord) -> Table:
    """Every cut in every precision, with the parameter whose error is the largest against its floor."""
    rows = []
    for cut in proof.cuts:
        worst = max(cut.parameters, key=_over_floor, default=None)
        rows.append(
            (
                cut.name,
                written_precision(proof, cut.precision),
                number(cut.micro_batches),
                ("exact" if cut.is_exact else "failed" if cut.failure else "not exact")
                + ("" if cut.decides else ", a note"),
                _error(cut.error),
                "" if worst is None else worst.name,
                "" if worst is None else _error(worst.error),
                "" if worst is None else number(worst.floor),
            )
        )
    columns = (
        "cut",
        "precision",
        "micro-batches",
        "verdict",
        "error",
        "largest against its floor",
        "its error",
        "its floor",
    )
    failures = dict.fromkeys(f"{cut.name} failed: {cut.failure.rstrip('.')}." for cut in proof.cuts if cut.failure)
    return Table(
        columns=columns,
        rows=tuple(rows),
        note=" ".join(["Errors are |accumulated - whole| / |whole|.", *failures, *proof.notes]),
    )


def weights_picture(proof: ProofRecord) -> Markup | None:
    """A cell per row: what each counted for in the accumulated gradient, beside what it should."""
    if not proof.weights:
        return None
    lanes = []
    for place, part in enumerate(proof.weights, start=1):
        should = "no weight is right" if part.wanted is None else f"should weigh {part.wanted:.3g}"
        note = "" if part.counted == 1 else f"weighs {part.weight or 0:.3g}, {should}"
        lanes.append(RowCells(label=f"micro-batch {place}", num_rows=len(part.rows), counted=part.counted, note=note))
    return row_cells(lanes, title="What each row counted for, beside what it should")


def finding_of(proof: ProofRecord) -> str:
    """The verdict in a word or two."""
    return "could not be judged" if proof.unjudged else "exact" if proof.is_exact else "not exact"


def proof_sentence(task: str, proof: ProofRecord) -> str:
    """The verdict in one sentence."""
    rows = plural(proof.rows or 0, "row")
    of_given = f" of {number(proof.rows_given)}" if proof.rows != proof.rows_given else ""
    cuts = plural(len({cut.name for cut in proof.cuts if cut.decides}), "cut")
    if proof.unjudged:
        return (
            f"{task} could not be judged: {rows}{of_given} draw random numbers that cannot be drawn again row by row."
        )
    if proof.is_exact:
        return f"{task} is exact: in {cuts}, {rows}{of_given} accumulated gave the gradient of all of them in one go."
    failed = plural(len({cut.name for cut in proof.cuts if cut.decides and not cut.is_exact}), "cut")
    if failed.startswith("0 "):
        return f"{task} is not exact: {proof.causes[0].explanation}"
    return f"{task} is not exact: in {failed}, {rows}{of_given} accumulated did not give the gradient of all of them in one go."


def largest_error(proof: ProofRecord, precision: str) -> float | None:
    """The largest error of any cut in this precision."""
    return max((cut.error for cut in proof.cuts if cut.precision == precision and cut.error is not None), default=None)


def written_precision(proof: ProofRecord, precision: str) -> str:
    """The name of a precision: float64, or the model's own by its dtype."""
    return proof.dtype if precision == "own" else precision


def _chart(precision: str, written: str, cuts: list[CutRecord]) -> Chart:
    names = [parameter.name for parameter in cuts[0].parameters]
    places = list(range(1, len(names) + 1))
    floors = [max((cut.parameters[place - 1].floor or 0.0) for cut in cuts) or None for place in places]
    series = [Series(name="floor", x=places, y=floors, colour=2, dash=1, labels=[f"{name}: floor" for name in names])]
    for index, cut in enumerate(cuts):
        series.append(
            Series(
                name=cut.name,
                x=places,
                y=[parameter.error or None for parameter in cut.parameters],
                colour=1 if index == 0 else index + 2,
                dash=(0, 2, 3, 4, 5)[index % 5],  # the floor has the squares
                kind="points",
                labels=[f"{name}: {cut.name}" for name in names],
            )
        )
    above = sorted({p.name for cut in cuts for p in cut.parameters if p.error is None or p.error > (p.floor or 0.0)})
    is_within = "Every error is below its floor" if not above else f"{plural(len(above), 'parameter')} above the floor"
    chart = line_chart(
        f"proof-{precision}",
        series,
        title=f"Error of each parameter's gradient, {written}",
        caption=f"{is_within}. The floor is what another order of summation explains; an error of 0 is not drawn.",
        table=Table(
            columns=("parameter", "floor", *(cut.name for cut in cuts)),
            rows=tuple(
                (name, number(floor), *(_error(cut.parameters[row].error) for cut in cuts))
                for row, (name, floor) in enumerate(zip(names, floors, strict=True))
            ),
        ),
        x_title="parameter, in the model's order",
        height=380,
        is_wide=True,
    )
    named = {"title": "", "names": [_short(name) for name in names]} if len(names) <= MOST_NAMES else {}
    axes = {"x": chart.figure["x"] | named, "y": chart.figure["y"] | {"log": True}}
    return replace(chart, figure={**chart.figure, **axes}, has_log=False)


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}"


def _over_floor(parameter: ParameterRecord) -> float:
    if parameter.error is None:
        return float("inf")
    return parameter.error / parameter.floor if parameter.floor else parameter.error


def _error(value: float | None) -> str:
    return "not finite" if value is None else number(float(f"{value:.2g}"))


CHARTED = {"accumulate": re.compile(r"\bnorm\b"), "loss": re.compile(r"^(loss|share)$")}
"""The stages, and what the names of their facts look like."""


def charts_of_trace(trace: Trace) -> Iterator[Chart]:
    """The gradient norm as it grows, the losses and the shares: a chart each, where they change between micro-batches."""
    wanted = [(stage, name) for stage, pattern in CHARTED.items() for name in _fact_names(trace, stage, pattern)]
    for place, (stage, name) in enumerate(wanted, start=1):
        points = _points(trace, stage, name)
        x, y = [index for index, _ in points], [value for _, value in points]
        if len(set(y)) < 2:
            continue
        yield line_chart(
            f"trace-{place}",
            [Series(name=words(name), x=x, y=y, colour=place)],
            title=f"{sentence_case(name)}, by micro-batch",
            caption=sentence([course_of(words(name), y)]),
            table=Table(
                columns=("micro-batch", words(name)),
                rows=tuple((number(index), number(value)) for index, value in points),
            ),
            x_title="micro-batch",
            from_zero=min(y) >= 0,
            height=260,
        )


def _fact_names(trace: Trace, stage: str, pattern: re.Pattern[str]) -> list[str]:
    names = (name for entry in trace.stages if entry.stage == stage for name in entry.facts)
    return [name for name in dict.fromkeys(names) if pattern.search(words(name))]


def _points(trace: Trace, stage: str, name: str) -> list[tuple[int, float]]:
    points: dict[int, float] = {}
    for entry in trace.stages:
        value = entry.facts.get(name)
        if entry.stage != stage or entry.micro_batch is None or isinstance(value, bool):
            continue
        if isinstance(value, int | float):
            points[entry.micro_batch] = value
    return sorted(points.items())


SIDE, GAP, ACROSS = 13, 3, 32
"""Pixels of a cell, between cells, and cells in a line."""


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
