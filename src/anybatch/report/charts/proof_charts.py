"""A proof as a page: the error of every parameter against its floor, every cut in a row of a table, causes in words."""

from collections.abc import Iterator
from dataclasses import replace

from markupsafe import Markup

from anybatch.records import CutRecord, ParameterRecord, ProofRecord
from anybatch.report.charts.cell_pictures import RowCells, row_cells
from anybatch.report.charts.chart import Chart, Series, Table, line_chart
from anybatch.report.writing import number, plural

MOST_NAMES = 12
"""More parameters than this are not named on the axis, only in the table and where one points."""
LONGEST_NAME = 18


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
