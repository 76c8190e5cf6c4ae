"""The arms of a comparison together: means and deviations over seeds, as charts and as one table."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from anybatch.report.charts.chart import Chart, Series, Table, line_chart
from anybatch.report.results import Arm, ArmEpoch, ArmRun, Comparison
from anybatch.report.writing import duration, is_share, number, percent, plural, size, words


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Several seeds as one number: their mean, and their sample deviation where there are two or more."""

    mean: float | None
    deviation: float | None

    def written(self, write: Callable[[float | None], str]) -> str:
        """Mean ± deviation, both to the second significant digit of the deviation; shares of one to a tenth of a percent."""
        if self.mean is None or not self.deviation:
            return write(self.mean)
        if write is percent:
            return f"{100 * self.mean:.1f} ± {100 * self.deviation:.1f} %"
        digits = min(12, max(0, 1 - math.floor(math.log10(self.deviation))))
        return f"{self.mean:,.{digits}f} ± {self.deviation:,.{digits}f}"


def spread_of(values: Sequence[float | None]) -> Spread:
    """The mean and deviation of what is known."""
    known = [value for value in values if value is not None]
    return Spread(mean=fmean(known) if known else None, deviation=stdev(known) if len(known) > 1 else None)


def comparison_charts(comparison: Comparison) -> Iterator[Chart]:
    """The metric, the validation loss and the training loss of all arms, per epoch."""
    metric = words(comparison.metric)
    wanted: tuple[tuple[str, str, Callable[[ArmEpoch], float | None]], ...] = (
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
        (f"validation {metric}", [final(arm, lambda p: p.metric).written(write) for arm in comparison.arms]),
        ("validation loss", [final(arm, lambda p: p.valid_loss).written(number) for arm in comparison.arms]),
        ("training loss", [final(arm, lambda p: p.train_loss).written(number) for arm in comparison.arms]),
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


def final(arm: Arm, take: Callable[[ArmEpoch], float | None]) -> Spread:
    """One number of the last epoch, over the arm's seeds."""
    return spread_of([take(run.epochs[-1]) for run in arm.runs if run.epochs])


def _arms_chart(name: str, what: str, arms: Sequence[Arm], take: Callable[[ArmEpoch], float | None]) -> Chart | None:
    drawn = [(index, arm) for index, arm in enumerate(arms) if any(_values(arm, take))]
    if not drawn:
        return None
    is_percent = _is_percent(what, arms, take)
    write = percent if is_percent else number
    epochs = sorted({point.epoch for _, arm in drawn for run in arm.runs for point in run.epochs})
    spreads = {index: [spread_of(_at(arm, epoch, take)) for epoch in epochs] for index, arm in drawn}
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
    ends = "; ".join(f"{arm.name}: {final(arm, take).written(write)}" for _, arm in drawn)
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
                (str(epoch), *(spreads[index][row].written(write) for index, _ in drawn))
                for row, epoch in enumerate(epochs)
            ),
        ),
        x_title="epoch",
        is_percent=is_percent,
        height=380 if name == "arms-metric" else 300,
        is_wide=name == "arms-metric",
    )


def _values(arm: Arm, take: Callable[[ArmEpoch], float | None]) -> Iterator[bool]:
    return (take(point) is not None for run in arm.runs for point in run.epochs)


def _at(arm: Arm, epoch: int, take: Callable[[ArmEpoch], float | None]) -> list[float | None]:
    return [take(point) for run in arm.runs for point in run.epochs if point.epoch == epoch]


def _is_percent(what: str, arms: Sequence[Arm], take: Callable[[ArmEpoch], float | None]) -> bool:
    return is_share(what, [take(point) for arm in arms for run in arm.runs for point in run.epochs])


def _mean(arm: Arm, take: Callable[[ArmRun], float | None], write: Callable[[float | None], str]) -> str:
    mean = spread_of([take(run) for run in arm.runs]).mean
    return write(mean)
