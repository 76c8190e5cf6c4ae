"""The window of one update as a timeline: one lane per micro-batch, one bar per stage; and memory over the same time."""

from collections.abc import Iterator, Sequence
from typing import Any

from anybatch.records import MemorySeen, StageTime, WindowSeen
from anybatch.report.charts.bars import bar_chart, bars_of
from anybatch.report.charts.chart import Chart, Key, Series, Table, line_chart, sentence
from anybatch.report.charts.thinning import evenly_spaced
from anybatch.report.writing import duration, duration_unit, number, plural, size, size_unit

STAGES = ("load", "forward", "loss", "backward", "accumulate", "clip", "step", "zero")
"""The order of the stages in an update, and in the legend."""
MOST_LANES = 24
"""Of more micro-batches than this, only the first half and the last half of this number are drawn."""
WHOLE = "update"
"""The lane of the stages that run once per update."""


def timeline_chart(window: WindowSeen) -> Chart:
    """One update, from its first stage to its last."""
    divisor, unit = duration_unit(window.seconds)
    lanes, num_hidden = lanes_of(window.stages)
    totals = stage_totals(window.stages)
    busy = sum(totals.values()) or 1.0
    longest = max(totals, key=lambda stage: totals[stage])
    num_micro_batches = len({span.micro_batch for span in window.stages} - {None})
    hidden = f"{plural(num_hidden, 'micro-batch')} in the middle not drawn" if num_hidden else ""
    first_lines = [
        f"update {number(window.update)} took {duration(window.seconds)} in {plural(num_micro_batches, 'micro-batch')}",
        f"{written_share(totals[longest] / busy)} of it {longest}",
        hidden,
    ]
    return bar_chart(
        "window",
        [
            _bars(stage, group, [span for span in window.stages if span.stage == stage], lanes, divisor)
            for group, stage in enumerate(totals)
        ],
        lanes,
        title="The window of one update",
        caption=sentence(first_lines),
        keys=[Key(name=stage, note=written_share(totals[stage] / busy)) for stage in totals],
        table=Table(
            columns=("stage", "lane", "start", "time"),
            rows=tuple(
                (span.stage, lane_of(span), duration(span.start), duration(span.seconds))
                for span in (window.stages[row] for row in evenly_spaced(len(window.stages)))
            ),
        ),
        x_title=f"time in {unit}",
        height=90 + 30 * len(lanes),
        is_wide=True,
    )


def memory_charts(curves: Sequence[MemorySeen]) -> Iterator[Chart]:
    """Memory within the last update that was measured, and the peaks of all of them."""
    drawn = [curve for curve in curves if len(curve.points) > 1]
    if drawn:
        yield _memory_curve(drawn[-1])
    peaks = [(curve.update, curve.peak_bytes) for curve in curves if curve.peak_bytes is not None]
    if len(peaks) > 1:
        divisor, unit = size_unit(max(peak for _, peak in peaks))
        highest = max(peaks, key=lambda peak: peak[1])
        yield line_chart(
            "memory-peaks",
            [Series(name="peak", x=[update for update, _ in peaks], y=[peak / divisor for _, peak in peaks], colour=4)],
            title="Peak memory per update",
            caption=f"The highest peak is {size(highest[1])}, in update {number(highest[0])}.",
            table=Table(
                columns=("update", "peak"),
                rows=tuple((number(peaks[row][0]), size(peaks[row][1])) for row in evenly_spaced(len(peaks))),
            ),
            x_title="update",
            unit=f" {unit}",
            from_zero=True,
        )


def _memory_curve(curve: MemorySeen) -> Chart:
    divisor, unit = size_unit(max(point.bytes for point in curve.points))
    time_divisor, time_unit = duration_unit(curve.points[-1].seconds - curve.points[0].seconds)
    start = curve.points[0].seconds
    peak = max(curve.points, key=lambda point: point.bytes)
    during = f", during {peak.stage}" if peak.stage else ""
    return line_chart(
        "memory",
        [
            Series(
                name="memory in use",
                x=[(point.seconds - start) / time_divisor for point in curve.points],
                y=[point.bytes / divisor for point in curve.points],
                colour=4,
                kind="area",
                labels=[point.stage or "memory" for point in curve.points],
            )
        ],
        title="Memory over one update",
        caption=f"Update {number(curve.update)} reached {size(peak.bytes)}{during}.",
        table=Table(
            columns=("time", "stage", "memory"),
            rows=tuple(
                (duration(point.seconds - start), point.stage, size(point.bytes))
                for point in (curve.points[row] for row in evenly_spaced(len(curve.points)))
            ),
        ),
        x_title=f"time in {time_unit}",
        x_unit=time_unit,
        unit=f" {unit}",
        from_zero=True,
    )


def lanes_of(spans: Sequence[StageTime]) -> tuple[list[str], int]:
    """The lanes that are drawn, from top to bottom, and how many micro-batches are not."""
    numbers = sorted({span.micro_batch for span in spans if span.micro_batch is not None})
    num_hidden = max(0, len(numbers) - MOST_LANES)
    if num_hidden:
        numbers = numbers[: MOST_LANES // 2] + numbers[-(MOST_LANES // 2) :]
    lanes = [f"micro-batch {index}" for index in numbers]
    return ([*lanes, WHOLE] if any(span.micro_batch is None for span in spans) else lanes), num_hidden


def lane_of(span: StageTime) -> str:
    """The lane of a stage: its micro-batch, or the whole update."""
    return WHOLE if span.micro_batch is None else f"micro-batch {span.micro_batch}"


def stage_totals(spans: Sequence[StageTime]) -> dict[str, float]:
    """Seconds per stage, in the order in which an update runs; stages we do not know come last."""
    found = dict.fromkeys(span.stage for span in spans)
    order = [stage for stage in STAGES if stage in found] + [stage for stage in found if stage not in STAGES]
    return {stage: sum(span.seconds for span in spans if span.stage == stage) for stage in order}


def stage_colour(stage: str) -> str:
    """The name of a stage's colour."""
    return f"--stage-{stage}" if stage in STAGES else "--soft"


def written_share(part: float) -> str:
    """A share of the time, without false precision.

    >>> written_share(0.537), written_share(0.004)
    ('54 %', 'under 1 %')
    """
    return "under 1 %" if part < 0.01 else f"{100 * part:.0f} %"


def _bars(stage: str, group: int, spans: list[StageTime], lanes: list[str], divisor: float) -> dict[str, Any]:
    drawn = [span for span in spans if lane_of(span) in lanes]
    return bars_of(
        stage,
        [lane_of(span) for span in drawn],
        [span.seconds / divisor for span in drawn],
        [duration(span.seconds) for span in drawn],
        colour=stage_colour(stage),
        group=group,
        starts=[span.start / divisor for span in drawn],
    )
