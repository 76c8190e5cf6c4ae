"""What an update needs: its peak by the size of the micro-batch, and what the peak is made of."""

from collections.abc import Iterator

from anybatch.records import PlanRecord
from anybatch.report.charts.bars import bar_chart, bars_of
from anybatch.report.charts.chart import Chart, Key, Series, Table, line_chart
from anybatch.report.writing import number, size, size_unit


def charts_of_plan(plan: PlanRecord) -> Iterator[Chart]:
    """Peak against micro-batch, and the parts of the peak at the size chosen."""
    if len(plan.sizes) > 1:
        yield _peaks(plan)
    if any(plan.breakdown.values()):
        yield _parts(plan)


def _peaks(plan: PlanRecord) -> Chart:
    divisor, unit = size_unit(max(plan.limit or 0, *(one.peak for one in plan.sizes)))
    x = [one.size for one in plan.sizes]
    series = [Series(name="predicted peak", x=x, y=[one.peak / divisor for one in plan.sizes], colour=4)]
    if plan.limit is not None:
        series.append(Series(name="what there is", x=[x[0], x[-1]], y=[plan.limit / divisor] * 2, colour=2, dash=1))
    chosen = f"{number(plan.micro_batch)} {plan.unit}" if plan.micro_batch else "none"
    return line_chart(
        "peaks",
        series,
        title="Peak memory by micro-batch",
        caption=f"The largest that fits into {size(plan.limit)}: {chosen}. The last point is the whole batch at once.",
        table=Table(
            columns=(f"micro-batch in {plan.unit}", "peak"),
            rows=tuple((number(one.size), size(one.peak)) for one in plan.sizes),
        ),
        x_title=f"{plan.unit} in a micro-batch",
        x_unit=plan.unit,
        unit=f" {unit}",
        from_zero=True,
    )


def _parts(plan: PlanRecord) -> Chart:
    divisor, unit = size_unit(max(part or 0 for part in plan.breakdown.values()))
    parts = [(name, part) for name, part in plan.breakdown.items() if part]
    largest = max(parts, key=lambda part: part[1])
    return bar_chart(
        "peak-parts",
        [
            bars_of(name, [name], [part / divisor], [size(part)], colour=f"--series-{index % 6 + 1}", group=index)
            for index, (name, part) in enumerate(parts)
        ],
        [name for name, _ in parts],
        title="What the peak is made of",
        caption=f"Most of it is {largest[0]}: {size(largest[1])} of {size(sum(part for _, part in parts))}.",
        keys=[Key(name=name, note=size(part)) for name, part in parts],
        table=Table(columns=("part", "memory"), rows=tuple((name, size(part)) for name, part in parts)),
        x_title=f"memory in {unit}",
        height=280,
    )
