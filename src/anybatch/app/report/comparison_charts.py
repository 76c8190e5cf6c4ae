"""The arms of a comparison: means and deviations over seeds, as charts and as one table."""

import math
from collections.abc import Callable, Iterator

from anybatch.app.records.schema import ArmEpoch, ArmRun, Comparison, Spread, at_epoch, over_runs
from anybatch.app.report.chart import Chart, Series, Table, line_chart
from anybatch.app.report.writing import capitalized, duration, is_share, number, percent, size, words
from anybatch.display import plural

Take = Callable[[ArmEpoch], float | None]
Write = Callable[[float | None], str]


def written_spread(spread: Spread, write: Write) -> str:
    """Write mean ± deviation to two significant digits of the deviation; percentages to one decimal."""
    if spread.mean is None or not spread.deviation:
        return write(spread.mean)
    if write is percent:
        return f"{100 * spread.mean:.1f} ± {100 * spread.deviation:.1f} %"
    digits = min(12, max(0, 1 - math.floor(math.log10(spread.deviation))))
    return f"{spread.mean:,.{digits}f} ± {spread.deviation:,.{digits}f}"


def charts_of_comparison(comparison: Comparison) -> Iterator[Chart]:
    """Chart the metric, the validation loss and the training loss of all arms over epochs."""
    for name, (what, take, write) in zip(("metric", "valid-loss", "train-loss"), _numbers(comparison), strict=True):
        if any(value is not None for value in _values(comparison, take)):
            yield _arms_chart(f"arms-{name}", what, comparison, take, write)


def final_table(comparison: Comparison) -> Table:
    """Tabulate the end of each arm; a column without numbers is left out."""
    arms = comparison.arms

    def means(take: Callable[[ArmRun], float | None], write: Write) -> list[str]:
        return [write(over_runs(arm, take).mean) for arm in arms]

    columns = [
        ("arm", [arm.name for arm in arms]),
        *(
            (what, [written_spread(at_epoch(arm, 0, take), write) for arm in arms])
            for what, take, write in _numbers(comparison)
        ),
        ("batch", [number(arm.batch) for arm in arms]),
        ("micro-batch", [number(arm.micro_batch) for arm in arms]),
        ("learning rate", [number(arm.lr) for arm in arms]),
        ("updates", means(lambda run: run.updates, number)),
        ("samples seen", means(lambda run: run.samples_seen, number)),
        ("time", means(lambda run: run.seconds, duration)),
        ("peak memory", means(lambda run: run.peak_bytes, size)),
    ]
    kept = [column for column in columns if any(cell != number(None) for cell in column[1])]
    note = f"After the last epoch: mean ± sample deviation over {plural(num_seeds(comparison), 'seed')}."
    return Table(tuple(title for title, _ in kept), tuple(zip(*(cells for _, cells in kept), strict=True)), note)


def num_seeds(comparison: Comparison) -> int:
    """Return the largest number of seeds of an arm; arms differ if the comparison was interrupted."""
    return max((len(arm.runs) for arm in comparison.arms), default=0)


def _numbers(comparison: Comparison) -> list[tuple[str, Take, Write]]:
    named: list[tuple[str, Take]] = [
        (f"validation {words(comparison.metric)}", lambda point: point.metric),
        ("validation loss", lambda point: point.valid_loss),
        ("training loss", lambda point: point.train_loss),
    ]
    return [(what, take, percent if is_share(what, _values(comparison, take)) else number) for what, take in named]


def _values(comparison: Comparison, take: Take) -> list[float | None]:
    return [take(point) for arm in comparison.arms for run in arm.runs for point in run.epochs]


def _arms_chart(name: str, what: str, comparison: Comparison, take: Take, write: Write) -> Chart:
    drawn = [
        (index, arm)
        for index, arm in enumerate(comparison.arms)
        if any(take(point) is not None for run in arm.runs for point in run.epochs)
    ]
    epochs = sorted({point.epoch for _, arm in drawn for run in arm.runs for point in run.epochs})
    spreads = [[at_epoch(arm, epoch, take) for epoch in epochs] for _, arm in drawn]
    series = [
        Series(arm.name, epochs, [s.mean for s in found], index + 1, index, deviation=[s.deviation for s in found])
        for (index, arm), found in zip(drawn, spreads, strict=True)
    ]
    ends = "; ".join(f"{arm.name}: {written_spread(at_epoch(arm, 0, take), write)}" for _, arm in drawn)
    seeds = max(len(arm.runs) for _, arm in drawn)
    band = f"Lines are means of {plural(seeds, 'seed')}, bands one deviation. " if seeds > 1 else ""
    rows = [(str(epoch), *(written_spread(found[row], write) for found in spreads)) for row, epoch in enumerate(epochs)]
    return line_chart(
        name,
        series,
        title=f"{capitalized(what)} per epoch",
        caption=f"{band}After the last epoch, {ends}.",
        table=Table(("epoch", *(arm.name for _, arm in drawn)), tuple(rows)),
        x_title="epoch",
        is_percent=write is percent,
        height=380 if name == "arms-metric" else 300,
        is_wide=name == "arms-metric",
    )
