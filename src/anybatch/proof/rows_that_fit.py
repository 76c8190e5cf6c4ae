"""How many rows fit: rows are doubled while the measured peak of one backward pass over them fits."""

import itertools
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from anybatch.batches import num_rows, take_rows
from anybatch.device_memory import has_counters, with_peak
from anybatch.errors import VerifyError
from anybatch.passes import common_device
from anybatch.proof.cases import Case, make_case, why_not_float64
from anybatch.torch_inside import profiler_events, without_op_names


def rows_that_fit(case: Case, limit: int) -> int:
    """The largest number of rows, of 2, 4, 8, ... and all, whose backward pass in one go takes at most `limit` bytes.

    Measured is the run that takes most, in float64 where the model has it. What does not fit is not run: the next doubling
    is taken to cost in proportion to the rows.
    """
    count = num_rows(case.batch)
    fits, sizes = 0, [*itertools.takewhile(lambda size: size < count, (2**power for power in range(1, 64))), count]
    seen: list[tuple[int, int]] = []
    for size in sizes:
        expected = _expected(seen, size)
        if expected > limit:
            break
        peak = _peak(case, size)
        seen.append((size, peak))
        if peak > limit:
            break
        fits = size
    if fits == 0:
        raise VerifyError(
            f"memory={limit:,} bytes: 2 rows in one go take {max(seen)[1]:,} bytes, with the weights and gradients of "
            "the copy. Give more, or rows that are shorter."
        )
    return fits


def _expected(seen: list[tuple[int, int]], size: int) -> int:
    """On the line through the last two peaks; what is not known yet is expected to fit."""
    if len(seen) < 2:
        return 0
    (small, low), (large, high) = seen[-2:]
    return high + (high - low) * (size - large) // (large - small)


def _peak(case: Case, size: int) -> int:
    """Bytes at the peak of a run of the first `size` rows: the copy, its gradients and the graph."""
    names = ("held", "batch_norm", "autocast", "copy", "batch_dim")
    options = {name: getattr(case, name) for name in names}
    part = make_case(case.model, case.objective, take_rows(case.batch, slice(0, size)), **options)
    wide = make_case(case.model, case.objective, part.batch, **options, precision="float64")
    if why_not_float64(case.model) is None:
        try:
            return _measured(case, wide.record)
        except (RuntimeError, TypeError, ValueError):  # a model that does not run in float64
            pass
    return _measured(case, part.record)


def _measured(case: Case, run: Callable[[], object]) -> int:
    device = common_device(case.model.parameters())
    if device is not None and has_counters(device):
        before = torch.accelerator.memory_allocated(device)
        return with_peak(run, device)[1] - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, without_op_names():
        run()
    events = profiler_events(profiler)
    allocated = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return int(max(itertools.accumulate((nbytes for _, nbytes in allocated), initial=0)))
