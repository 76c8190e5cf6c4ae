"""What another batch would take, and the noise of the gradient while a run went on."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from anybatch.records import AdviceRecord, Results
from anybatch.report.charts.chart import Chart, Series, Table, line_chart
from anybatch.report.charts.thinning import evenly_spaced
from anybatch.report.writing import number


def charts_of_advice(advice: AdviceRecord) -> Iterator[Chart]:
    """Updates, samples and time to the same loss, against the batch."""
    if len(advice.outlook) < 2:
        return
    batches = [one.batch for one in advice.outlook]  # each twice the one before: places are their logarithms
    x = list(range(1, len(batches) + 1))
    lines = [
        Series(name="updates", x=x, y=[one.updates for one in advice.outlook], colour=1),
        Series(name="samples", x=x, y=[one.samples for one in advice.outlook], colour=2, dash=1),
    ]
    if any(one.seconds is not None for one in advice.outlook):
        lines.append(Series(name="time", x=x, y=[one.seconds for one in advice.outlook], colour=4, dash=2))
    yours = [place for place, batch in enumerate(batches, start=1) if batch == advice.batch]
    lines.append(Series(name="your batch", x=yours, y=[1.0] * len(yours), colour=3, kind="points"))
    chart = line_chart(
        "outlook",
        lines,
        title="To the same loss, by batch",
        caption=f"As multiples of what your batch of {number(advice.batch)} rows takes; predicted from a noise scale of "
        f"{number(_two_digits(advice.noise_scale))} rows, off by up to {number(advice.factor)} either way in runs.",
        table=Table(
            columns=("batch", *(line.name for line in lines[:-1])),
            rows=tuple(
                (number(batch), *(number(_two_digits(line.y[row])) for line in lines[:-1]))
                for row, batch in enumerate(batches)
            ),
        ),
        x_title="rows in a batch",
        x_unit="rows",
        is_wide=True,
    )
    axes = {
        "x": chart.figure["x"] | {"names": [number(batch) for batch in batches]},
        "y": chart.figure["y"] | {"log": True},
    }
    yield replace(chart, figure={**chart.figure, **axes}, has_log=False)


def noise_charts(results: Results) -> Iterator[Chart]:
    """The noise scale over training, and the batch beside it."""
    points = [one for one in results.updates if one.noise_scale is not None]
    if not points:
        return
    x = [one.update for one in points]
    batches = [one.rows for one in points]
    lines: list[Series] = [
        Series(name="noise scale", x=x, y=[one.noise_scale for one in points], colour=1),
        Series(name="low end of 90 %", x=x, y=[one.noise_low for one in points], colour=1, kind="faint"),
        Series(name="high end of 90 %", x=x, y=[one.noise_high for one in points], colour=1, kind="faint"),
        Series(name="your batch", x=x, y=batches, colour=2, dash=1),
    ]
    rows = evenly_spaced(len(x))
    last = points[-1]
    yield line_chart(
        "noise",
        lines,
        title="Noise scale, in rows",
        caption=f"A batch of {number(_two_digits(last.noise_scale))} rows has as much noise as signal at update "
        f"{number(last.update)}; yours has {number(last.rows)}. The interval is that of sampling alone.",
        table=Table(
            columns=("update", "noise scale", "low", "high"),
            rows=tuple(
                (number(x[row]), *_written(points[row].noise_scale, points[row].noise_low, points[row].noise_high))
                for row in rows
            ),
        ),
        x_title="update",
    )


def _written(*values: float | None) -> Sequence[str]:
    return [number(_two_digits(value)) for value in values]


def _two_digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.2g}")
