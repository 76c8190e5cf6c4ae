"""The guard of an `Update`: do the losses of a few rows add up? Forwards only; where they do not, `verify` decides."""

from collections.abc import Callable
from typing import Any

import torch

from anybatch.core import (
    PENDING,
    Accumulator,
    Batch,
    FakeTensor,
    FirstLook,
    MicroBatches,
    Ranks,
    free_memory,
    is_out_of_memory,
    take_rows,
)
from anybatch.errors import ExactnessError, first_line
from anybatch.ragged import Tokens
from anybatch.verification.compared_precision import autocast_dtype
from anybatch.verification.forwards import Forwards, NotJudgedError
from anybatch.verification.sample_losses import (
    Difference,
    Measured,
    Piece,
    Sample,
    choose_rows,
    differences,
    whole_micro_batches,
)

TOLERANCE = {torch.float64: 1e-10, torch.float32: 3e-6}
"""Relative error of the loss above which gradients are compared. Lower precisions: 1e-3."""
COARSE = {torch.float64: 1e-9, torch.float32: 2e-4}
"""Relative error above which the loss is wrong even if no gradients can be compared. Lower precisions: 3e-2."""
MOST_MICRO_BATCHES = 8
"""Most micro-batches that are compared as they are, if rows do not add up one by one."""
MOST_PARAMETERS = 200_000_000
"""Most parameters of a model that is copied, in float64."""

NO_DIFFERENCE = Difference(name="loss", error=0.0, whole=0.0, together=0.0)


def look_first(accumulator: Accumulator, batch: Batch) -> FirstLook:
    """Raise `ExactnessError`, with the likely cause, where the losses of a few rows are not those of their parts put together.

        loss(A and B) * (units(A) + units(B)) = loss(A) * units(A) + loss(B) * units(B)

    Rows are at most 8, at most those of one micro-batch, and run forward twice each, without a graph. BatchNorm uses the
    statistics of all of them; random draws are drawn again by row. Where they are further apart than rounding explains,
    `verify` judges their gradients, so that nothing is refused that is exact. What cannot be judged is told by the result. A
    batch that is not cut is exact whatever its loss, and the next one is looked at. Everything is left as it was. Each rank
    looks at its own rows, and all raise if one does.
    """
    if accumulator.engine.is_even:
        return FirstLook(finding="not judged", reason="the model is sharded, and a forward of it takes all ranks")
    return looked_together(accumulator.engine.ranks, lambda: _look(accumulator, batch))


def looked_together(ranks: Ranks, look: Callable[[], FirstLook]) -> FirstLook:
    """Run `look` on the rows of this rank; if it raises on one rank, all raise."""
    found, problem = PENDING, None
    try:
        found = look()
    except Exception as error:
        problem = error
    is_refused = ranks.any(problem is not None)
    if problem is not None:
        raise problem
    if is_refused:
        raise ExactnessError("the look at the first batch failed on another rank, which says why; nothing was changed.")
    return found


def _look(accumulator: Accumulator, batch: Batch) -> FirstLook:
    try:
        if isinstance(next(accumulator.model.parameters(), None), FakeTensor):
            return FirstLook(finding="not judged", reason="the model has no numbers")
        sample = choose_rows(accumulator, batch)
        if sample is None:
            return PENDING
        if isinstance(sample, str):
            return FirstLook(finding="not judged", reason=sample)
        return _judge(accumulator, Forwards(accumulator, sample), batch)
    except NotJudgedError as error:
        return FirstLook(finding="not judged", reason=str(error))
    except ExactnessError:
        raise
    except Exception as error:  # what is wrong with the batch or the model, the update itself will say
        reason = first_line(error)
        is_memory = is_out_of_memory(error)
    if is_memory:
        free_memory()
    return FirstLook(finding="not judged", reason=reason)


def _judge(accumulator: Accumulator, forwards: Forwards, batch: Batch) -> FirstLook:
    with forwards.undone():
        whole = forwards.whole()
        if not whole.is_finite:
            raise NotJudgedError("the loss is not finite")
        dtype = _dtype(accumulator, whole)
        tolerance = TOLERANCE.get(dtype, 1e-3) if _can_copy(forwards) else COARSE.get(dtype, 3e-2)
        worst = _apart(forwards, whole)
        is_off = worst.error > tolerance or worst.units_differ
        if is_off and _distance(whole, forwards.again()) > tolerance / 10 and not forwards.left():
            raise NotJudgedError(
                "the same rows give another loss when they run again: something draws, or remembers, unseen"
            )
        if is_off and _is_exact_as_cut(accumulator, batch, tolerance):
            is_off = False
        is_sound = not is_off and not _has_state(forwards, tolerance)
        message = None if is_sound else _verdict(accumulator, forwards, worst, COARSE.get(dtype, 3e-2))
    left = ", ".join(forwards.left()[:4])
    if message is None:
        told = left and f"its forwards changed {left}, outside of the model, where nothing is put back"
        return FirstLook(finding="passed", error=worst.error, reason=told)
    raise ExactnessError(
        "the first batch shows that the accumulated gradient is not the whole batch's; nothing "
        f"{left and f'but {left} '}was changed. "
        f"{_looked(forwards.sample, worst, whole)} {message}\nMend the cause; verify(model, objective, batch) shows more. "
        "check='off' trains as it is."
    )


def _apart(forwards: Forwards, whole: Measured) -> Difference:
    """How far the parts are from the whole, at worst. Parts that have nothing to show are followed by others."""
    worst = NO_DIFFERENCE
    failure: Exception | None = None
    for pieces in forwards.sample.ways:
        try:
            parts = [forwards.part(piece) for piece in pieces]
        except NotJudgedError:
            raise
        except Exception as error:  # rows that cannot run by themselves are no rows
            if is_out_of_memory(error):
                raise
            failure = error
            continue
        if all(part.is_finite for part in parts):
            failure = None
            order = [number for piece in pieces for number in piece.rows]
            worst = max([worst, *differences(whole, parts, order)], key=lambda one: (one.units_differ, one.error))
            if all(part.shows for part in parts):
                return worst
        else:
            failure = NotJudgedError("the loss of some of its rows is not finite")
    if failure is not None:
        value = whole.values[0].value if whole.values else 0.0
        return Difference(name="loss", error=float("inf"), whole=value, together=float("nan"))
    return worst


def _is_exact_as_cut(accumulator: Accumulator, batch: Batch, tolerance: float) -> bool:
    """True where rows do not add up one by one, but the micro-batches do: those that belong together lie in one."""
    sample = whole_micro_batches(accumulator, batch, MOST_MICRO_BATCHES)
    if sample is None:
        return False
    forwards = Forwards(accumulator, sample)
    with forwards.undone():
        whole = forwards.whole()
        ways = [[forwards.part(piece) for piece in pieces] for pieces in sample.ways]
    found = [one for parts in ways for one in differences(whole, parts, range(sample.num_rows))]
    is_near = all(one.error <= min(tolerance, 1e-3) and not one.units_differ for one in found)
    return is_near and whole.is_finite and all(part.is_finite and part.shows for parts in ways for part in parts)


def _has_state(forwards: Forwards, tolerance: float) -> bool:
    """True where what Python code left behind in the forward of some rows changes the loss of others."""
    if not forwards.changed:
        return False
    first, second, *_ = forwards.sample.ways[0]
    return _distance(forwards.part(second), forwards.after(first, second)) > tolerance


def _distance(one: Measured, other: Measured) -> float:
    pairs = [(a.value, b.value) for a, b in zip(one.values, other.values, strict=True)]
    pairs += [(float(a.norm()), float((a - b).norm() + a.norm())) for a, b in zip(one.rows, other.rows, strict=True)]
    return max((abs(a - b) / max(abs(a), abs(b)) for a, b in pairs if a != b), default=0.0)


def _can_copy(forwards: Forwards) -> bool:
    return sum(parameter.numel() for parameter in forwards.model.parameters()) <= MOST_PARAMETERS


def _verdict(accumulator: Accumulator, forwards: Forwards, worst: Difference, coarse: float) -> str | None:
    """Compare the gradients of these rows; return the message, or None if they are exact."""
    from anybatch.verification.comparing import verify

    options: dict[str, Any] = {
        "batch_norm": "exact" if accumulator.running.batch_norm == "exact" else "frozen",
        "autocast": accumulator.running.autocast,
    }
    sample, split = forwards.sample, accumulator.split
    by_tokens = isinstance(split, Tokens) and split.collate is None
    given = sample.batch if by_tokens else MicroBatches([piece.batch for piece in sample.ways[0]])
    if by_tokens:
        options["micro_batch"] = split
    try:
        if not _can_copy(forwards):
            return _without_proof(forwards, worst, coarse, f"more than {MOST_PARAMETERS:,} parameters")
        verdict = verify(forwards.model, forwards.objective, given, **options)
    except Exception as error:  # a model that cannot be copied, say
        return _without_proof(forwards, worst, coarse, first_line(error))
    in_float64 = [cut for cut in verdict.cuts if cut.precision == "float64"]
    if all(cut.is_exact for cut in in_float64 or verdict.cuts):  # what only rounding explains is no mistake
        return None
    known = [cause for cause in verdict.causes if cause.kind != "unknown"]
    causes = [f"\ncause ({cause.kind}): {cause.explanation}\nfix: {cause.fix}" for cause in known]
    told = "".join(causes) or f"\ncause, likely (coupled): {_COUPLED}"  # no count of units mends it
    return f"The gradient of these rows is {verdict.error:.1e} off.{told}"


def _without_proof(forwards: Forwards, worst: Difference, coarse: float, why: str) -> str:
    numbers = range(forwards.sample.num_rows - 1, -1, -1)
    backwards = forwards.part(Piece(rows=tuple(numbers), batch=take_rows(forwards.sample.batch, list(numbers))))
    noise = max(
        (abs(a.value - b.value) for a, b in zip(forwards.whole().values, backwards.values, strict=True)), default=0.0
    )
    if worst.error <= coarse or abs(worst.whole - worst.together) <= 20 * noise:
        raise NotJudgedError(f"the loss is {worst.error:.1e} off, and its gradient could not be compared ({why})")
    kind, explanation = _likely(worst)
    return f"\ncause, likely ({kind}): {explanation}"


def _likely(worst: Difference) -> tuple[str, str]:
    if worst.is_sum:
        return "sum", "the loss is a sum over rows, not a mean: give reduction='sum', or return the mean."
    if worst.is_between:
        return (
            "units",
            "the loss is a mean over something other than the units given: give units=, a function of the batch.",
        )
    return "coupled", _COUPLED


_COUPLED = (
    "what comes out for some rows depends on the others: a statistic of the batch, a ratio or a power of a mean, a "
    "comparison of rows.\nfix: Give Coupled(encode, loss), with all that looks at several rows in loss(representations); "
    "Terms(...) where means with different units are added up."
)


def _looked(sample: Sample, worst: Difference, whole: Measured) -> str:
    sizes = " and ".join(str(len(piece.rows)) for piece in sample.ways[0])
    what = worst.name if worst.name == "loss" or whole.rows else f"term {worst.name!r}"
    if whole.rows:
        return f"Of {sample.num_rows} rows in one go {what} is {worst.error:.1e} away from that of {sizes} of them."
    return (
        f"Of {sample.num_rows} rows in one go the {what} is {worst.whole:.6g}; put together from {sizes} of them it is "
        f"{worst.together:.6g}, {worst.error:.1e} off."
    )


def _dtype(accumulator: Accumulator, whole: Measured) -> torch.dtype:
    """The coarsest precision that the loss passed through."""
    fast = autocast_dtype(accumulator.running.autocast)
    held = [parameter.dtype for parameter in accumulator.model.parameters()]
    floats = [dtype for dtype in {*held, whole.dtype, *([fast] if fast else [])} if dtype.is_floating_point]
    return max(floats, key=lambda dtype: torch.finfo(dtype).eps)
