"""The numbers of a traced update that change from micro-batch to micro-batch, as small charts."""

from collections.abc import Iterator

from anybatch.report.chart import Chart, Series, Table, course, line_chart, sentence
from anybatch.report.results import Walk
from anybatch.report.writing import number, sentence_case, words

CHARTED = (("accumulate", "norm"), ("loss", "share"), ("loss", "loss"))
"""A stage, and a word in the name of its fact."""


def walk_charts(walk: Walk) -> Iterator[Chart]:
    """The gradient norm as it grows, each share and each loss: one chart each, where two micro-batches have it."""
    seen: set[tuple[str, str]] = set()
    for stage, word in CHARTED:
        for name in _fact_names(walk, stage, word):
            if (stage, name) in seen:
                continue
            seen.add((stage, name))
            points = _points(walk, stage, name)
            if len(points) < 2:
                continue
            x, y = [x for x, _ in points], [y for _, y in points]
            yield line_chart(
                f"walk-{len(seen)}",
                [Series(name=words(name), x=x, y=y, colour=len(seen))],
                title=f"{sentence_case(name)}, over the micro-batches",
                caption=sentence([course(words(name), y)]),
                table=Table(
                    columns=("micro-batch", words(name)),
                    rows=tuple((number(place), number(value)) for place, value in points),
                ),
                x_title="micro-batch",
                from_zero=min(y) >= 0,
                height=240,
            )


def _fact_names(walk: Walk, stage: str, word: str) -> list[str]:
    names = (name for step in walk.steps if step.stage == stage for name in step.facts)
    return [name for name in dict.fromkeys(names) if word in words(name).split()]


def _points(walk: Walk, stage: str, name: str) -> list[tuple[int, float]]:
    points: dict[int, float] = {}
    for step in walk.steps:
        value = step.facts.get(name)
        if step.stage != stage or step.micro_batch is None or isinstance(value, bool):
            continue
        if isinstance(value, int | float):
            points[step.micro_batch] = value
    return sorted(points.items())
