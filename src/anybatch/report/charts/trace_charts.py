"""The numbers of a traced update that change from micro-batch to micro-batch, as small charts."""

import re
from collections.abc import Iterator

from anybatch.records import Trace
from anybatch.report.charts.chart import Chart, Series, Table, course_of, line_chart, sentence
from anybatch.report.writing import number, sentence_case, words

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
