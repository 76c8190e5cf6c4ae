"""The arms of a comparison together: means and deviations over seeds, as charts and as one table."""

import math
from collections.abc import Callable, Iterator, Sequence

from anybatch.app.records.schema import Arm, ArmEpoch, ArmRun, Comparison, Spread, at_epoch, over_runs
from anybatch.app.report.chart import Chart, Series, Table, line_chart
from anybatch.app.report.writing import duration, is_share, number, percent, plural, size, words

Take = Callable[[ArmEpoch], float | None]
"""One number of an epoch."""
Write = Callable[[float | None], str]


def written_spread(spread: Spread, write: Write) -> str:
    """Mean ± deviation, both to the second significant digit of the deviation; shares of one to a tenth of a percent."""
    if spread.mean is None or not spread.deviation:
        return write(spread.mean)
    if write is percent:
        return f"{100 * spread.mean:.1f} ± {100 * spread.deviation:.1f} %"
    digits = min(12, max(0, 1 - math.floor(math.log10(spread.deviation))))
    return f"{spread.mean:,.{digits}f} ± {spread.deviation:,.{digits}f}"


def charts_of_comparison(comparison: Comparison) -> Iterator[Chart]:
    """The metric, the validation loss and the training loss of all arms, per epoch."""
    metric = words(comparison.metric)
    wanted: tuple[tuple[str, str, Take], ...] = (
        ("arms-metric", f"validation {metric}", lambda point: point.metric),
        ("arms-valid-loss", "validation loss", lambda point: point.valid_loss),
        ("arms-train-loss", "training loss", lambda point: point.train_loss),
    )
    for name, what, take in wanted:
        if chart := _arms_chart(name, what, comparison.arms, take):
            yield chart


def final_table(comparison: Comparison) -> Table:
    """What each arm ended with; a column that no arm has a number for is left out."""
    metric = words(comparison.metric)
    write = percent if _is_percent(metric, comparison.arms, lambda point: point.metric) else number
    columns: list[tuple[str, list[str]]] = [
        ("arm", [arm.name for arm in comparison.arms]),
        (f"validation {metric}", _ends(comparison, lambda point: point.metric, write)),
        ("validation loss", _ends(comparison, lambda point: point.valid_loss, number)),
        ("training loss", _ends(comparison, lambda point: point.train_loss, number)),
        ("batch", [number(arm.batch) for arm in comparison.arms]),
        ("micro-batch", [number(arm.micro_batch) for arm in comparison.arms]),
        ("learning rate", [number(arm.lr) for arm in comparison.arms]),
        ("updates", [_mean(arm, lambda run: run.updates, number) for arm in comparison.arms]),
        ("samples seen", [_mean(arm, lambda run: run.samples_seen, number) for arm in comparison.arms]),
        ("time", [_mean(arm, lambda run: run.seconds, duration) for arm in comparison.arms]),
        ("peak memory", [_mean(arm, lambda run: run.peak_bytes, size) for arm in comparison.arms]),
    ]
    nothing = number(None)
    kept = [column for column in columns if any(cell != nothing for cell in column[1])]
    return Table(
        columns=tuple(title for title, _ in kept),
        rows=tuple(zip(*(cells for _, cells in kept), strict=True)),
        note=f"After the last epoch: mean ± sample deviation over {plural(num_seeds(comparison), 'seed')}.",
    )


def num_seeds(comparison: Comparison) -> int:
    """How many seeds the arms ran over; the most, where a comparison was cut short."""
    return max((len(arm.runs) for arm in comparison.arms), default=0)


def _ends(comparison: Comparison, take: Take, write: Write) -> list[str]:
    """One number of the last epoch of every arm, over its seeds."""
    return [written_spread(at_epoch(arm, 0, take), write) for arm in comparison.arms]


def _arms_chart(name: str, what: str, arms: Sequence[Arm], take: Take) -> Chart | None:
    drawn = [(index, arm) for index, arm in enumerate(arms) if any(_values(arm, take))]
    if not drawn:
        return None
    is_percent = _is_percent(what, arms, take)
    write = percent if is_percent else number
    epochs = sorted({point.epoch for _, arm in drawn for run in arm.runs for point in run.epochs})
    spreads = {index: [at_epoch(arm, epoch, take) for epoch in epochs] for index, arm in drawn}
    series = [
        Series(
            name=arm.name,
            x=epochs,
            y=[spread.mean for spread in spreads[index]],
            deviation=[spread.deviation for spread in spreads[index]],
            colour=index + 1,
            dash=index,
        )
        for index, arm in drawn
    ]
    ends = "; ".join(f"{arm.name}: {written_spread(at_epoch(arm, 0, take), write)}" for _, arm in drawn)
    seeds = max(len(arm.runs) for _, arm in drawn)
    band = f"Lines are means of {plural(seeds, 'seed')}, bands one deviation. " if seeds > 1 else ""
    return line_chart(
        name,
        series,
        title=f"{what[:1].upper()}{what[1:]} per epoch",
        caption=f"{band}After the last epoch, {ends}.",
        table=Table(
            columns=("epoch", *(arm.name for _, arm in drawn)),
            rows=tuple(
                (str(epoch), *(written_spread(spreads[index][row], write) for index, _ in drawn))
                for row, epoch in enumerate(epochs)
            ),
        ),
        x_title="epoch",
        is_percent=is_percent,
        height=380 if name == "arms-metric" else 300,
        is_wide=name == "arms-metric",
    )


def _values(arm: Arm, take: Take) -> Iterator[bool]:
    return (take(point) is not None for run in arm.runs for point in run.epochs)


def _is_percent(what: str, arms: Sequence[Arm], take: Take) -> bool:
    return is_share(what, [take(point) for arm in arms for run in arm.runs for point in run.epochs])


def _mean(arm: Arm, take: Callable[[ArmRun], float | None], write: Write) -> str:
    return write(over_runs(arm, take).mean)
