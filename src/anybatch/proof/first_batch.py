"""The self-check of an `Update`: its first batch, before it learns from it."""

import copy
from dataclasses import replace
from typing import Any

from anybatch.batches import Batch, Dealt, MicroBatches, Rows, Tokens, num_rows, take_rows, why_rows_stay
from anybatch.errors import ExactnessError, VerifyError
from anybatch.parallel import unwrapped
from anybatch.passes import Accumulator, has_rows
from anybatch.proof.cases import leaving_untouched, make_case, why_not_float64
from anybatch.proof.comparing import unit_of, verify
from anybatch.proof.cuts import uneven_cut
from anybatch.proof.first_look import PENDING, FirstLook, by_kind, looked_together, spread_evenly
from anybatch.proof.floor import floor_of, relative
from anybatch.state import outer_random

FEWEST_ROWS = 3
"""Of a sample: fewer cannot be cut unevenly."""
COARSE = 1e-6
"""Roundoff above which a gradient says too little in its own precision."""
NEAR = 10.0
"""Floors, which are not measured here, within which gradients agree; what is further apart `verify` judges."""


def self_check(accumulator: Accumulator, batch: Batch) -> FirstLook:
    """Raise `ExactnessError`, with the cause, unless rows of this batch give the same gradient in one go and accumulated.

    As many rows as one micro-batch holds, and 3 at least, spread over the batch and cut unevenly; with `Tokens`, trimmed as it
    trims: so it needs no more memory than the update, but for a copy of the model, and costs two passes over one micro-batch.
    Models that round coarsely run in float64. Where these are too far apart, `verify` judges, and looks for the cause; what it
    cannot judge does not stop training, and is told by the result. With `batch_norm="micro"` the user has chosen other
    statistics than the batch's; then all else is checked, with BatchNorm frozen. Everything is left as it was. Each rank looks
    at rows of its own, and all raise if one does. A batch of fewer than 3 rows is left to the next.
    """
    if accumulator.engine.is_even:
        raise VerifyError(
            "check=True runs a copy of the model, and one sharded by fully_shard cannot be copied. Call verify() on the model "
            "before it is sharded, and use check='off'."
        )
    return looked_together(accumulator.engine.ranks, lambda: _look_at(accumulator, batch))


def _look_at(accumulator: Accumulator, batch: Batch) -> FirstLook:
    sample = _spread_rows(accumulator, batch)
    if isinstance(sample, FirstLook):
        return sample
    mode = accumulator.running.batch_norm
    options: dict[str, Any] = {
        "batch_norm": "frozen" if mode == "micro" else mode,
        "autocast": accumulator.running.autocast,
    }
    try:
        error = _error(accumulator, sample, options)
    except VerifyError as error_of_copy:
        return FirstLook(finding="not judged", reason=str(error_of_copy))
    if error is not None:
        return FirstLook(finding="passed", error=error)
    verdict = verify(
        unwrapped(accumulator.model),
        accumulator.objective,
        sample,
        micro_batch=_smaller(accumulator.split, sample) if _trims(accumulator.split) else None,
        **options,
    )
    if not verdict.is_judged:
        return FirstLook(finding="not judged", reason=verdict.unjudged)
    if not verdict.is_exact:
        raise ExactnessError(
            "the self-check of the first batch found that its accumulated gradient is not the whole batch's; nothing "
            f"was changed. {verdict.describe()}\nMend the cause, or use check='off' to train as it is."
        )
    return FirstLook(finding="passed", error=verdict.error)


def _error(accumulator: Accumulator, sample: Batch, options: dict[str, Any]) -> float | None:
    """How far a cut of these rows is from all of them in one go; None where it is too far, or cannot be said so simply."""
    model = unwrapped(accumulator.model)
    with leaving_untouched(model, accumulator.objective) as held:
        case = make_case(model, accumulator.objective, sample, held=held, **options)
        split = accumulator.split
        cut = _smaller(split, sample).cut(sample) if _trims(split) else uneven_cut(sample)
        if unit_of(case) > COARSE and why_not_float64(case.model) is None:
            case = replace(case, precision="float64")
        outer = outer_random()
        try:
            floor = floor_of(case.record(), [], unit_of(case))
            accumulated = case.accumulated(cut)
        except VerifyError:
            raise
        except Exception:  # verify says what it was, and whether it matters
            return None
        draws = case.draws
        is_simple = not (draws.shared or draws.seeded or draws.unlike or draws.strange or outer.moved())
        errors = floor.errors(accumulated, len(cut))
        if not is_simple or any(parameter.error > NEAR * parameter.floor for parameter in errors):
            return None
        return relative(floor.whole, accumulated)


def _trims(split: object) -> bool:
    return isinstance(split, Tokens) and split.collate is None


def _smaller(split: Any, sample: Batch) -> Tokens:
    """The same split with a third of the sample's tokens as its budget: so that the sample is cut as a batch is."""
    finer = copy.deepcopy(split)  # one that learns must not learn from this
    finer._has_warned = True
    measured = finer.measure(sample)
    longest = max(measured.lengths)
    return finer.with_budget(max(longest, len(measured.lengths) * longest // 3))  # type: ignore[no-any-return]


def _spread_rows(accumulator: Accumulator, batch: Batch) -> Batch | FirstLook:
    """Rows from all over the batch, as many as its first micro-batch has, at least 3; or why there are none."""
    if isinstance(batch, Dealt):
        batch = batch.batch
    if not has_rows(batch):
        return FirstLook(finding="not judged", reason="this rank has no rows")
    why = why_rows_stay(accumulator.split, batch)
    if why is not None:
        return FirstLook(finding="not judged", reason=why)
    if isinstance(batch, MicroBatches):
        return next((part for part in batch if num_rows(part) >= FEWEST_ROWS), PENDING)
    choose_for = getattr(accumulator.split, "choose_for", None)
    if choose_for is not None:
        choose_for(accumulator.workload, batch)  # what the update would begin with
    split = copy.deepcopy(accumulator.split)  # one that learns must not learn from this
    rows = split.cut(batch).row_numbers
    count = sum(map(len, rows))
    wanted = min(count, max(FEWEST_ROWS, len(rows[0])))
    if count < FEWEST_ROWS:
        return PENDING
    places = spread_evenly(count, wanted)
    if isinstance(split, Rows | Tokens) and split.collate is not None:
        return split.collate([batch[row] for row in places])
    order = by_kind(batch, count)
    return take_rows(batch, sorted(order[place] for place in places))
