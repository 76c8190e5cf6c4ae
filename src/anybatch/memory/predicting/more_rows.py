"""The plan of a batch like the one that was planned for, with more rows: nothing is tried again."""

from dataclasses import replace

from anybatch.memory.predicting.largest_fitting import largest_of
from anybatch.memory.predicting.memory_plan import Plan


def for_more_rows(plan: Plan, rows: int, batch_bytes: int) -> Plan | None:
    """The same micro-batches beside a larger batch; None where a batch of that size has to be tried itself.

    So it is where the smaller one was not cut, because then nothing is known of more rows in one piece, and where micro-batches
    meet: in coupled losses, in lockstep. Ways that were ranked, and what to change, belong to fewer rows and are left out.
    """
    one = plan.whole_size // plan.rows
    peaks = plan.peaks.for_more_rows(rows, batch_bytes)
    if peaks is None or not plan.fits or not plan.needs_accumulation:
        return None
    size = largest_of(peaks, plan.limit, one, plan.micro_batch)
    if not size:
        return None
    return replace(
        plan,
        micro_batch=size,
        peak_bytes=peaks.peak(size),
        rows=rows,
        whole_size=one * rows,
        whole_bytes=plan.whole_bytes + peaks.more,
        least_bytes=plan.least_bytes + peaks.more,
        sizes=tuple(
            replace(entry, peak=entry.peak + peaks.more, fits=entry.peak + peaks.more <= plan.limit)
            for entry in plan.sizes
        ),
        breakdown=replace(plan.breakdown, inputs=plan.breakdown.inputs + peaks.more),
        is_confirmed=False,
        peaks=peaks,
        ways_to_fit=(),
        ranking=(),
        not_ranked=(),
    )
