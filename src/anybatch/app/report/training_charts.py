"""A run, its updates and its plan as charts: loss, metrics, learning rate, gradient norm, noise, time lines, memory."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anybatch.app.records.run_folder import Results
from anybatch.app.records.schema import EpochDone, MemorySeen, PlanRecord, StageTime, UpdateDone, WindowSeen
from anybatch.app.report.chart import (
    CROSS,
    MOST_POINTS,
    Chart,
    Key,
    Series,
    Table,
    bar_chart,
    bars_of,
    course_of,
    evenly_spaced,
    line_chart,
    sentence,
    smooth,
)
from anybatch.app.report.writing import (
    duration,
    duration_unit,
    is_share,
    number,
    percent,
    plural,
    size,
    size_unit,
    words,
)

FEWEST_TO_SMOOTH = 30
"""Shorter traces are shown as they are."""


def epoch_charts(epochs: Sequence[EpochDone]) -> Iterator[Chart]:
    """Loss and every metric, per epoch."""
    training, validation = [point.train_loss for point in epochs], [point.valid_loss for point in epochs]
    if chart := _epoch_chart("epoch-loss", "Loss per epoch", "loss", epochs, training, validation):
        yield chart
    for index, name in enumerate(_names([table for point in epochs for table in (point.metrics, point.train_metrics)])):
        training = [point.train_metrics.get(name) for point in epochs]
        validation = [point.metrics.get(name) for point in epochs]
        title = f"{words(name).capitalize()} per epoch"
        if chart := _epoch_chart(f"epoch-metric-{index}", title, words(name), epochs, training, validation):
            yield chart


def update_charts(results: Results) -> Iterator[Chart]:
    """Loss and every metric, per update."""
    updates = results.updates
    skipped = [point for point in updates if not point.applied]
    losses = [point.loss for point in updates]
    note = f"{plural(len(skipped), 'update')} skipped" if skipped else ""
    if chart := _update_chart("update-loss", "Loss per update", "loss", updates, losses, note=note, is_wide=True):
        yield chart
    for index, name in enumerate(_names([point.metrics for point in updates])):
        values = [point.metrics.get(name) for point in updates]
        title = f"{words(name).capitalize()} per update"
        if chart := _update_chart(f"update-metric-{index}", title, words(name), updates, values):
            yield chart


def rate_and_norm_charts(results: Results) -> Iterator[Chart]:
    """The learning rate and the gradient norm, per update."""
    updates = results.updates
    rates = [point.lr for point in updates]
    known = [rate for rate in rates if rate is not None]
    peak = f"highest {number(max(known))}" if known and max(known) not in (known[0], known[-1]) else ""
    if chart := _update_chart(
        "learning-rate", "Learning rate", "learning rate", updates, rates, note=peak, is_smooth=False
    ):
        yield chart
    norms = [point.grad_norm for point in updates]
    clip = results.run.settings.get("clip_norm")
    note = f"clipped to {number(clip)}" if isinstance(clip, float | int) and clip else ""
    title = "Gradient norm, before clipping" if note else "Gradient norm"
    if chart := _update_chart("gradient-norm", title, "gradient norm", updates, norms, note=note, colour=3):
        yield chart


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


def _epoch_chart(
    name: str,
    title: str,
    what: str,
    epochs: Sequence[EpochDone],
    training: list[float | None],
    validation: list[float | None],
) -> Chart | None:
    x = [point.epoch for point in epochs]
    named = [("training", training, 1), ("validation", validation, 2)]
    lines = [(half, values, colour) for half, values, colour in named if any(value is not None for value in values)]
    if not lines:
        return None
    is_percent = is_share(what, training + validation)
    write = percent if is_percent else number
    return line_chart(
        name,
        [
            Series(name=f"{half} {what}", x=x, y=values, colour=colour, dash=colour - 1)
            for half, values, colour in lines
        ],
        title=title,
        caption=sentence([course_of(f"{half} {what}", values, is_percent=is_percent) for half, values, _ in lines]),
        table=Table(
            columns=("epoch", *(f"{half} {what}" for half, _, _ in lines)),
            rows=tuple((str(x[row]), *(write(values[row]) for _, values, _ in lines)) for row in range(len(x))),
        ),
        x_title="epoch",
        is_percent=is_percent,
    )


def _update_chart(
    name: str,
    title: str,
    what: str,
    updates: Sequence[UpdateDone],
    values: list[float | None],
    *,
    note: str = "",
    colour: int = 1,
    is_smooth: bool = True,
    is_wide: bool = False,
) -> Chart | None:
    if not any(value is not None for value in values):
        return None
    x = [point.update for point in updates]
    is_percent = is_share(what, values)
    write = percent if is_percent else number
    if is_smooth and len(values) >= FEWEST_TO_SMOOTH:
        width = max(5, len(values) // 40)
        lines = [
            Series(name=what, x=x, y=values, colour=colour, kind="faint"),
            Series(name=f"mean of {width} updates", x=x, y=smooth(values, width), colour=colour),
        ]
    else:
        lines = [Series(name=what, x=x, y=values, colour=colour)]
    skipped = [(point.update, value) for point, value in zip(updates, values, strict=True) if not point.applied]
    marked = [(update, value) for update, value in skipped if value is not None]
    if is_smooth and marked:
        lines.append(
            Series(
                name="skipped", x=[u for u, _ in marked], y=[v for _, v in marked], colour=2, dash=CROSS, kind="points"
            ),
        )
    rows = evenly_spaced(len(x))
    left_out = f"{len(rows)} of {number(len(x))} updates; metrics.jsonl holds them all." if len(rows) < len(x) else ""
    thinned = "lowest and highest of each stretch drawn" if len(x) > MOST_POINTS else ""
    return line_chart(
        name,
        lines,
        title=title,
        caption=sentence([course_of(what, values, is_percent=is_percent), note, thinned]),
        table=Table(
            columns=("update", what), rows=tuple((number(x[row]), write(values[row])) for row in rows), note=left_out
        ),
        x_title="update",
        is_percent=is_percent,
        is_wide=is_wide,
    )


def _names(tables: Sequence[Mapping[str, float | None]]) -> list[str]:
    return list(dict.fromkeys(name for table in tables for name in table))


def _written(*values: float | None) -> Sequence[str]:
    return [number(_two_digits(value)) for value in values]


def _two_digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.2g}")


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
