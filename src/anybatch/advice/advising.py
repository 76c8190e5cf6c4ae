"""Advice from the records of a run: three sentences that say what they do not know, and the numbers of a picture."""

from dataclasses import replace
from statistics import median

from anybatch.advice.tradeoff import FACTOR, Tradeoff
from anybatch.records import AdviceRecord, BatchOutlook, Results, Scalar, WindowSeen

WARM = 3
"""Updates that are left out of times: the first warms up, and the next two are looked at from inside."""


UNMEASURED_RUN = (
    "this run did not measure noise; train with --noise 8, or ask `anybatch advise TASK`. With one micro-batch to a batch, a "
    'coupled loss or batch_norm="exact" there is none to measure'
)


def advise_run(results: Results) -> AdviceRecord:
    """What the noise that a training run measured says of its batch."""
    plan = results.run.plan
    seen = [one.noise_scale for one in results.updates if one.noise_scale is not None]
    batch = _whole(plan.get("batch")) or max((one.rows or 1 for one in results.updates), default=1)
    fixed, row = _times(results, batch) or (None, None)
    micro_batch, ranks = _micro_batch(results, batch), _whole(plan.get("ranks")) or 1
    least = min((micro_batch or 1) * ranks, batch)
    return advise(
        Tradeoff(noise=median(seen) if seen else float("nan"), batch=batch, fixed=fixed, row=row, least=least),
        micro_batch=micro_batch,
        ranks=ranks,
        reason="" if seen else UNMEASURED_RUN,
    )


def advise(tradeoff: Tradeoff, *, micro_batch: int | None, ranks: int = 1, reason: str = "") -> AdviceRecord:
    """The record of what `tradeoff` says; without a noise scale, the reason alone."""
    batch = tradeoff.batch
    common = AdviceRecord(
        batch=batch,
        micro_batch=micro_batch,
        ranks=ranks,
        noise_scale=None,
        factor=FACTOR,
        fixed_seconds=tradeoff.fixed,
        row_seconds=tradeoff.row,
        soonest=None,
        sentences=(f"Nothing can be said of a batch of {batch:,}: {reason}.",),
        outlook=(),
        reason=reason,
    )
    if reason:
        return common
    sizes = sorted({max(round(batch * 2.0**step), 1) for step in range(-4, 5)})
    return replace(
        common,
        noise_scale=tradeoff.noise,
        soonest=tradeoff.soonest,
        sentences=(_of_noise(tradeoff), _of_doubling(tradeoff), _of_time(tradeoff, micro_batch, ranks)),
        outlook=tuple(
            BatchOutlook(
                batch=size,
                updates=tradeoff.updates(size),
                samples=tradeoff.samples(size),
                seconds=tradeoff.seconds(size),
            )
            for size in sizes
        ),
    )


def _of_noise(tradeoff: Tradeoff) -> str:
    low, high = tradeoff.noise / FACTOR, tradeoff.noise * FACTOR
    return (
        f"A batch of about {_rows(tradeoff.noise)} has as much noise as signal in its gradient; in six runs such numbers were "
        f"off by a factor of 1.3 to {FACTOR:g} either way, so read {_rows(low)} to {_rows(high)}."
    )


def _of_doubling(tradeoff: Tradeoff) -> str:
    batch = tradeoff.batch
    likely = _doubled(tradeoff)
    ends = [_doubled(replace(tradeoff, noise=tradeoff.noise * factor)) for factor in (1 / FACTOR, FACTOR)]
    return (
        f"Doubling {batch:,} to {2 * batch:,}: about {likely[0]:.0%} fewer updates, {likely[1]:.0%} more samples to the same "
        f"loss ({ends[0][0]:.0%} and {ends[0][1]:.0%} to {ends[1][0]:.0%} and {ends[1][1]:.0%} within that factor)."
    ).replace("%", " %")


def _doubled(tradeoff: Tradeoff) -> tuple[float, float]:
    twice = 2 * tradeoff.batch
    return 1 - tradeoff.updates(twice), tradeoff.samples(twice) - 1


def _of_time(tradeoff: Tradeoff, micro_batch: int | None, ranks: int) -> str:
    soonest, fixed, row = tradeoff.soonest, tradeoff.fixed, tradeoff.row
    if soonest is None or fixed is None or row is None:
        return "How long updates take was not measured, so nothing is said of time."
    where = "on one device" if ranks == 1 else f"on {ranks} ranks, their all-reduce included"
    ends = [replace(tradeoff, noise=tradeoff.noise * factor).soonest or 1.0 for factor in (1 / FACTOR, FACTOR)]
    ahead = 1 - (tradeoff.seconds(soonest) or 1.0)
    told = (
        f"An update takes {_milliseconds(fixed)} beside its rows and {_milliseconds(row)} a row {where}: batches of about "
        f"{_rows(soonest)} ({_rows(ends[0])} to {_rows(ends[1])}) reach a loss soonest, in about {max(ahead, 0.0):.0%} less "
        f"time than {tradeoff.batch:,}."
    ).replace("%", " %")
    return f"{told} {_of_accumulation(tradeoff, micro_batch, ranks)}".strip()


def _of_accumulation(tradeoff: Tradeoff, micro_batch: int | None, ranks: int) -> str:
    """Whether several micro-batches to an update pay, against an update after each; nothing where there is but one."""
    if micro_batch is None or micro_batch * ranks >= tradeoff.batch:
        return ""
    each = micro_batch * ranks
    times = [
        replace(tradeoff, noise=tradeoff.noise * factor).seconds(each) or 1.0 for factor in (1 / FACTOR, 1.0, FACTOR)
    ]
    if times[1] <= 1.0:
        sure = "" if times[-1] <= 1.0 else f", unless the noise is {FACTOR:g} times larger than measured"
        return (
            f"Accumulation costs here and brings nothing: an update after every {each:,} rows, with its own learning rate, "
            f"reaches the same loss in {1 - times[1]:.0%} less time{sure}."
        ).replace("%", " %")
    sure = "" if times[0] >= 1.0 else f", unless the noise is {FACTOR:g} times smaller than measured"
    return (
        f"Accumulation pays here: an update after every {each:,} rows would take {times[1] - 1:.0%} more time to the same "
        f"loss{sure}."
    ).replace("%", " %")


def _times(results: Results, batch: int) -> tuple[float, float] | None:
    """Seconds of an update beside its rows, and of one row on all ranks together, from the timeline of one update.

    A typical pass is the median one: what the last one has on top, such as the sum over ranks, is beside the rows.
    """
    spans = [one.seconds for one in results.updates if one.rows == batch and one.seconds and one.update > WARM]
    if not results.windows or not spans:
        return None
    seen = results.windows[-1]
    passes = _passes(seen)
    if not passes or not seen.seconds:
        return None
    share = min(len(passes) * median(passes) / seen.seconds, 1.0)
    return median(spans) * (1 - share), median(spans) * share / batch


def _passes(window: WindowSeen) -> list[float]:
    """Seconds of each micro-batch of a timeline."""
    spans: dict[int, float] = {}
    for stage in window.stages:
        if stage.micro_batch is not None:
            spans[stage.micro_batch] = spans.get(stage.micro_batch, 0.0) + stage.seconds
    return list(spans.values())


def _micro_batch(results: Results, batch: int) -> int | None:
    planned = results.run.plan.get("micro_batch")
    if isinstance(planned, int):
        return planned
    counts = [one.micro_batches for one in results.updates if one.micro_batches and one.rows == batch]
    return max(round(batch / median(counts)), 1) if counts else None


def _whole(value: Scalar) -> int:
    return int(value) if isinstance(value, int | float) else 0


def _rows(rows: float) -> str:
    """Two digits are all that such a number has.

    >>> _rows(1.2), _rows(47.9), _rows(1234.0)
    ('1 row', '48 rows', '1,200 rows')
    """
    rounded = float(f"{rows:.2g}") if rows >= 10 else float(round(rows))
    return f"{rounded:,.0f} row{'' if rounded == 1 else 's'}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2g} ms" if seconds < 0.0995 else f"{seconds:.2g} s"
