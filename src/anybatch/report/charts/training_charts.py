"""The training trace as charts: loss, metrics, learning rate and gradient norm, per epoch and per update."""

from collections.abc import Iterator, Mapping, Sequence

from anybatch.records import EpochDone, Results, UpdateDone
from anybatch.report.charts.chart import CROSS, Chart, Series, Table, course_of, line_chart, sentence
from anybatch.report.charts.thinning import MOST_POINTS, evenly_spaced, smooth
from anybatch.report.writing import is_share, number, percent, plural, words

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
