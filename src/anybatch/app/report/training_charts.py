"""Charts of a training run and of a memory plan: losses, metrics, learning rate, noise, time lines, memory."""

from collections.abc import Iterator, Mapping, Sequence

from anybatch.app.records.run_folder import Results
from anybatch.app.records.schema import EpochDone, MemorySeen, PlanRecord, StageTime, UpdateDone, WindowSeen
from anybatch.app.report import chart as charts
from anybatch.app.report.chart import Chart, Key, Series, Table, bars_of, course_of, evenly_spaced, line_chart, sentence
from anybatch.app.report.writing import duration, duration_unit, is_share, number, percent, size, size_unit, words
from anybatch.display import plural

FEWEST_TO_SMOOTH = 30
"""Shorter lines are not smoothed."""
STAGES = ("load", "forward", "loss", "backward", "accumulate", "clip", "step", "zero")
"""Stages in the order of an update and of the legend."""
MAX_LANES = 24
"""Most micro-batches that are drawn: the first half and the last half of this number."""
WHOLE = "update"
"""Lane of the stages that run once per update."""

Values = list[float | None]


def epoch_charts(epochs: Sequence[EpochDone]) -> Iterator[Chart]:
    """Chart the loss and every metric over epochs."""
    training, validation = [point.train_loss for point in epochs], [point.valid_loss for point in epochs]
    yield from _epoch_chart("epoch-loss", "loss", epochs, training, validation)
    for index, name in enumerate(_names([table for point in epochs for table in (point.metrics, point.train_metrics)])):
        training = [point.train_metrics.get(name) for point in epochs]
        validation = [point.metrics.get(name) for point in epochs]
        yield from _epoch_chart(f"epoch-metric-{index}", words(name), epochs, training, validation)


def update_charts(results: Results) -> Iterator[Chart]:
    """Chart the loss, every metric, the learning rate, the gradient norm and the noise scale over updates."""
    updates = results.updates
    num_skipped = sum(not point.applied for point in updates)
    note = f"{plural(num_skipped, 'update')} skipped" if num_skipped else ""
    losses = [point.loss for point in updates]
    yield from _update_chart("update-loss", "Loss per update", "loss", updates, losses, note=note, is_wide=True)
    for index, name in enumerate(_names([point.metrics for point in updates])):
        values = [point.metrics.get(name) for point in updates]
        title = f"{words(name).capitalize()} per update"
        yield from _update_chart(f"update-metric-{index}", title, words(name), updates, values)
    rates = [point.lr for point in updates]
    known = [rate for rate in rates if rate is not None]
    note = f"highest {number(max(known))}" if known and max(known) not in (known[0], known[-1]) else ""
    what = "learning rate"
    yield from _update_chart("learning-rate", "Learning rate", what, updates, rates, note=note, is_smooth=False)
    norms = [point.grad_norm for point in updates]
    clip = results.run.settings.get("clip_norm")
    note = f"clipped to {number(clip)}" if isinstance(clip, float | int) and clip else ""
    title = "Gradient norm, before clipping" if note else "Gradient norm"
    yield from _update_chart("gradient-norm", title, "gradient norm", updates, norms, note=note, colour=3)
    yield from _noise_chart([point for point in updates if point.noise_scale is not None])


def _names(tables: Sequence[Mapping[str, float | None]]) -> list[str]:
    return list(dict.fromkeys(name for table in tables for name in table))


def _epoch_chart(
    name: str, what: str, epochs: Sequence[EpochDone], training: Values, validation: Values
) -> Iterator[Chart]:
    x = [point.epoch for point in epochs]
    named = [(f"training {what}", training, 1), (f"validation {what}", validation, 2)]
    lines = [line for line in named if any(value is not None for value in line[1])]
    is_percent = is_share(what, training + validation)
    write = percent if is_percent else number
    rows = [(str(epoch), *(write(values[row]) for _, values, _ in lines)) for row, epoch in enumerate(x)]
    if lines:
        yield line_chart(
            name,
            [Series(half, x, values, colour, dash=colour - 1) for half, values, colour in lines],
            title=f"{what.capitalize()} per epoch",
            caption=sentence(*(course_of(half, values, is_percent=is_percent) for half, values, _ in lines)),
            table=Table(("epoch", *(half for half, _, _ in lines)), tuple(rows)),
            x_title="epoch",
            is_percent=is_percent,
        )


def _update_chart(
    name: str,
    title: str,
    what: str,
    updates: Sequence[UpdateDone],
    values: Values,
    *,
    note: str = "",
    colour: int = 1,
    is_smooth: bool = True,
    is_wide: bool = False,
) -> Iterator[Chart]:
    if not any(value is not None for value in values):
        return
    x = [point.update for point in updates]
    is_percent = is_share(what, values)
    write = percent if is_percent else number
    lines = [Series(what, x, values, colour)]
    if is_smooth and len(values) >= FEWEST_TO_SMOOTH:
        width = max(5, len(values) // 40)
        mean = Series(f"mean of {width} updates", x, charts.smooth(values, width), colour)
        lines = [Series(what, x, values, colour, kind="faint"), mean]
    skipped = [(point.update, value) for point, value in zip(updates, values, strict=True) if not point.applied]
    marked = {update: value for update, value in skipped if value is not None}
    if is_smooth and marked:
        lines.append(Series("skipped", list(marked), list(marked.values()), 2, charts.CROSS, "points"))
    rows = evenly_spaced(len(x))
    left_out = f"{len(rows)} of {number(len(x))} updates; metrics.jsonl holds them all." if len(rows) < len(x) else ""
    thinned = "lowest and highest of each stretch drawn" if len(x) > charts.MAX_POINTS else ""
    yield line_chart(
        name,
        lines,
        title=title,
        caption=sentence(course_of(what, values, is_percent=is_percent), note, thinned),
        table=Table(("update", what), tuple((number(x[row]), write(values[row])) for row in rows), left_out),
        x_title="update",
        is_percent=is_percent,
        is_wide=is_wide,
    )


def _noise_chart(points: Sequence[UpdateDone]) -> Iterator[Chart]:
    """Chart the noise scale with its interval, next to the batch size."""
    if not points:
        return
    x, last = [one.update for one in points], points[-1]
    scales, lows, highs = zip(*((one.noise_scale, one.noise_low, one.noise_high) for one in points), strict=True)

    def two_digits(value: float | None) -> str:
        return number(None if value is None else float(f"{value:.2g}"))

    rows = [
        (number(x[row]), *(two_digits(values[row]) for values in (scales, lows, highs)))
        for row in evenly_spaced(len(x))
    ]
    yield line_chart(
        "noise",
        [
            Series("noise scale", x, scales),
            Series("low end of 90 %", x, lows, kind="faint"),
            Series("high end of 90 %", x, highs, kind="faint"),
            Series("your batch", x, [one.rows for one in points], 2, dash=1),
        ],
        title="Noise scale, in rows",
        caption=f"A batch of {two_digits(last.noise_scale)} rows has as much noise as signal at update "
        f"{number(last.update)}; yours has {number(last.rows)}. The interval is that of sampling alone.",
        table=Table(("update", "noise scale", "low", "high"), tuple(rows)),
        x_title="update",
    )


def timeline_chart(window: WindowSeen) -> Chart:
    """Draw the stages of one update over time, with a lane for each micro-batch."""
    divisor, unit = duration_unit(window.seconds)
    lanes, num_hidden = lanes_of(window.stages)
    totals = stage_totals(window.stages)
    busy = sum(totals.values()) or 1.0
    longest = max(totals, key=lambda stage: totals[stage])
    num_micro_batches = len({span.micro_batch for span in window.stages} - {None})
    bars = []
    for group, stage in enumerate(totals):
        drawn = [
            (_lane(span), span.start / divisor, span.seconds / divisor, duration(span.seconds))
            for span in window.stages
            if span.stage == stage and _lane(span) in lanes
        ]
        bars.append(bars_of(stage, drawn, colour=stage_colour(stage), group=group))
    shown = [window.stages[row] for row in evenly_spaced(len(window.stages))]
    rows = [(span.stage, _lane(span), duration(span.start), duration(span.seconds)) for span in shown]
    return charts.bar_chart(
        "window",
        bars,
        lanes,
        title="The window of one update",
        caption=sentence(
            f"update {number(window.update)} took {duration(window.seconds)} in {plural(num_micro_batches, 'micro-batch')}",
            f"{_written_share(totals[longest] / busy)} of it {longest}",
            f"{plural(num_hidden, 'micro-batch')} in the middle not drawn" if num_hidden else "",
        ),
        keys=tuple(Key(stage, _written_share(total / busy)) for stage, total in totals.items()),
        table=Table(("stage", "lane", "start", "time"), tuple(rows)),
        x_title=f"time in {unit}",
        height=90 + 30 * len(lanes),
        is_wide=True,
    )


def lanes_of(spans: Sequence[StageTime]) -> tuple[list[str], int]:
    """Return the lanes to draw, from top to bottom, and the number of micro-batches left out."""
    numbers = sorted({span.micro_batch for span in spans if span.micro_batch is not None})
    num_hidden = max(0, len(numbers) - MAX_LANES)
    if num_hidden:
        numbers = numbers[: MAX_LANES // 2] + numbers[-(MAX_LANES // 2) :]
    lanes = [f"micro-batch {index}" for index in numbers]
    return ([*lanes, WHOLE] if any(span.micro_batch is None for span in spans) else lanes), num_hidden


def _lane(span: StageTime) -> str:
    return WHOLE if span.micro_batch is None else f"micro-batch {span.micro_batch}"


def stage_totals(spans: Sequence[StageTime]) -> dict[str, float]:
    """Return the seconds of each stage in the order of an update; unknown stages come last."""
    found = dict.fromkeys(span.stage for span in spans)
    order = [stage for stage in STAGES if stage in found] + [stage for stage in found if stage not in STAGES]
    return {stage: sum(span.seconds for span in spans if span.stage == stage) for stage in order}


def stage_colour(stage: str) -> str:
    """Return the CSS variable of a stage's colour."""
    return f"--stage-{stage}" if stage in STAGES else "--soft"


def _written_share(part: float) -> str:
    return "under 1 %" if part < 0.01 else f"{100 * part:.0f} %"


def memory_charts(curves: Sequence[MemorySeen]) -> Iterator[Chart]:
    """Chart the memory within the last measured update, and the peaks of all measured updates."""
    drawn = [curve for curve in curves if len(curve.points) > 1]
    if drawn:
        yield _memory_curve(drawn[-1])
    peaks = [(curve.update, curve.peak_bytes) for curve in curves if curve.peak_bytes is not None]
    if len(peaks) > 1:
        highest = max(peaks, key=lambda peak: peak[1])
        divisor, unit = size_unit(highest[1])
        rows = [(number(peaks[row][0]), size(peaks[row][1])) for row in evenly_spaced(len(peaks))]
        yield line_chart(
            "memory-peaks",
            [Series("peak", [update for update, _ in peaks], [peak / divisor for _, peak in peaks], colour=4)],
            title="Peak memory per update",
            caption=f"The highest peak is {size(highest[1])}, in update {number(highest[0])}.",
            table=Table(("update", "peak"), tuple(rows)),
            x_title="update",
            unit=f" {unit}",
            from_zero=True,
        )


def _memory_curve(curve: MemorySeen) -> Chart:
    points, start = curve.points, curve.points[0].seconds
    peak = max(points, key=lambda point: point.bytes)
    divisor, unit = size_unit(peak.bytes)
    time_divisor, time_unit = duration_unit(points[-1].seconds - start)
    during = f", during {peak.stage}" if peak.stage else ""
    x = [(point.seconds - start) / time_divisor for point in points]
    labels = [point.stage or "memory" for point in points]
    shown = [points[row] for row in evenly_spaced(len(points))]
    rows = [(duration(point.seconds - start), point.stage, size(point.bytes)) for point in shown]
    return line_chart(
        "memory",
        [Series("memory in use", x, [point.bytes / divisor for point in points], 4, kind="area", labels=labels)],
        title="Memory over one update",
        caption=f"Update {number(curve.update)} reached {size(peak.bytes)}{during}.",
        table=Table(("time", "stage", "memory"), tuple(rows)),
        x_title=f"time in {time_unit}",
        x_unit=time_unit,
        unit=f" {unit}",
        from_zero=True,
    )


def charts_of_plan(plan: PlanRecord) -> Iterator[Chart]:
    """Chart the peak over micro-batch sizes, and the parts of the peak at the size chosen."""
    if len(plan.sizes) > 1:
        yield _peaks(plan)
    if parts := {name: part for name, part in plan.breakdown.items() if part}:
        yield _parts(parts)


def _peaks(plan: PlanRecord) -> Chart:
    divisor, unit = size_unit(max(plan.limit or 0, *(one.peak for one in plan.sizes)))
    x = [one.size for one in plan.sizes]
    series = [Series("predicted peak", x, [one.peak / divisor for one in plan.sizes], colour=4)]
    if plan.limit is not None:
        series.append(Series("what there is", [x[0], x[-1]], [plan.limit / divisor] * 2, colour=2, dash=1))
    chosen = f"{number(plan.micro_batch)} {plan.unit}" if plan.micro_batch else "none"
    rows = tuple((number(one.size), size(one.peak)) for one in plan.sizes)
    return line_chart(
        "peaks",
        series,
        title="Peak memory by micro-batch",
        caption=f"The largest that fits into {size(plan.limit)}: {chosen}. The last point is the whole batch at once.",
        table=Table((f"micro-batch in {plan.unit}", "peak"), rows),
        x_title=f"{plan.unit} in a micro-batch",
        x_unit=plan.unit,
        unit=f" {unit}",
        from_zero=True,
    )


def _parts(parts: Mapping[str, float]) -> Chart:
    largest = max(parts, key=lambda name: parts[name])
    divisor, unit = size_unit(parts[largest])
    sizes = tuple((name, size(part)) for name, part in parts.items())
    bars = [
        bars_of(name, [(name, 0, parts[name] / divisor, text)], colour=f"--series-{index % 6 + 1}", group=index)
        for index, (name, text) in enumerate(sizes)
    ]
    return charts.bar_chart(
        "peak-parts",
        bars,
        list(parts),
        title="What the peak is made of",
        caption=f"Most of it is {largest}: {size(parts[largest])} of {size(sum(parts.values()))}.",
        keys=tuple(Key(*each) for each in sizes),
        table=Table(("part", "memory"), sizes),
        x_title=f"memory in {unit}",
        height=280,
    )
