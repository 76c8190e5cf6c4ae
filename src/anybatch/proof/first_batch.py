"""The self-check of an `Update`: its first batch, before it learns from it."""

import copy
from dataclasses import replace
from typing import Any

from anybatch.batches import Batch, MicroBatches, Tokens
from anybatch.errors import ExactnessError, VerifyError
from anybatch.parallel import unwrapped
from anybatch.passes import Accumulator
from anybatch.proof.cases import (
    Case,
    ComparedPrecision,
    GradientAside,
    SharedWeights,
    leaving_untouched,
    make_case,
    raised_dtype,
)
from anybatch.proof.checked_rows import Take, checked_rows, is_coarse
from anybatch.proof.comparing import unit_of, verify
from anybatch.proof.cuts import uneven_cut
from anybatch.proof.first_look import FirstLook, looked_together
from anybatch.proof.floor import Apart
from anybatch.state import TensorFile, outer_random

NEAR = 10.0
"""Floors, which are not measured here, within which gradients agree; what is further apart `verify` judges."""


def self_check(accumulator: Accumulator, batch: Batch) -> FirstLook:
    """Raise `ExactnessError`, with the cause, unless rows of this batch give the same gradient in one go and accumulated.

    Three quarters as many rows as one micro-batch holds, and 3 at least, spread over the batch and cut unevenly; with `Tokens`,
    trimmed as it trims. Copies share the model's weights, and gradients wait on disk: so it needs no more memory than the
    update in micro-batches of 3 rows or more, and costs two passes over these rows. Models that round more coarsely than fp32
    run in that, with half the rows; bf16 and fp16 weights are then copied, which `plan` and `Fit` count. Where gradients are
    too far apart, `verify` judges, and looks for the cause; what it cannot judge does not stop training, and is told by the
    result. With `batch_norm="micro"` the user has chosen other statistics than the batch's; then all else is checked, with
    BatchNorm frozen. Everything is left as it was. Each rank looks at rows of its own, and all raise if one does. A batch of
    fewer than 3 rows is left to the next.
    """
    if accumulator.engine.is_even:
        raise VerifyError(
            "check=True runs a copy of the model, and one sharded by fully_shard cannot be copied. Call verify() on the model "
            "before it is sharded, and use check='off'."
        )
    return looked_together(accumulator.engine.ranks, lambda: _look_at(accumulator, batch))


def _look_at(accumulator: Accumulator, batch: Batch) -> FirstLook:
    rows = checked_rows(accumulator, batch)
    if isinstance(rows, FirstLook):
        return rows
    mode = accumulator.running.batch_norm
    options: dict[str, Any] = {
        "batch_norm": "frozen" if mode == "micro" else mode,
        "autocast": accumulator.running.autocast,
    }
    try:
        error = _error(accumulator, rows.compared, options)
    except (VerifyError, OSError) as error_of_copy:  # a model that cannot be copied, a disk that is full
        return FirstLook(finding="not judged", reason=str(error_of_copy))
    if error is not None:
        return FirstLook(finding="passed", error=error)
    sample = rows.explained()
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


def _error(accumulator: Accumulator, take: Take, options: dict[str, Any]) -> float | None:
    """How far a cut of these rows is from all of them in one go; None where it is too far, or cannot be said so simply."""
    model = unwrapped(accumulator.model)
    precision: ComparedPrecision = "float32" if is_coarse(model, accumulator.running.autocast) else "own"
    shared = SharedWeights(model, raised_dtype(precision))
    with leaving_untouched(model, accumulator.objective, shared.put_back) as held:
        case = make_case(model, accumulator.objective, take(), held=held, shared=shared, precision=precision, **options)
        outer = outer_random()
        try:
            whole = _recorded(case, take)
            case = replace(case, batch=take())  # the first run may have written to its rows
            cut = _cut(accumulator.split, case.batch)
            accumulated = case.accumulated(cut)
        except (VerifyError, OSError):
            raise
        except Exception:  # verify says what it was, and whether it matters
            return None
        draws = case.draws
        is_simple = not (draws.shared or draws.seeded or draws.unlike or draws.strange or outer.moved())
        apart = Apart(norms=whole.norms, distances=whole.distances(accumulated), terms=accumulated.terms)
        errors = apart.errors(len(cut), unit_of(case))
        if not is_simple or any(parameter.error > NEAR * parameter.floor for parameter in errors):
            return None
        return apart.relative


def _recorded(case: Case, take: Take) -> GradientAside:
    """All rows in one go; once more where attention drew inside its kernel, by kernels that show what they draw."""
    whole = GradientAside(case.record(), TensorFile())
    if case.shared is None or not any("attention" in told for told in case.draws.strange):
        return whole
    case.shared.is_attention_visible = True
    return GradientAside(replace(case, batch=take()).record(), TensorFile())


def _cut(split: object, sample: Batch) -> MicroBatches:
    return _smaller(split, sample).cut(sample) if _trims(split) else uneven_cut(sample)


def _trims(split: object) -> bool:
    return isinstance(split, Tokens) and split.collate is None


def _smaller(split: Any, sample: Batch) -> Tokens:
    """The same split with a third of the sample's tokens as its budget: so that the sample is cut as a batch is."""
    finer = copy.deepcopy(split)  # one that learns must not learn from this
    finer._has_warned = True
    measured = finer.measure(sample)
    longest = max(measured.lengths)
    return finer.with_budget(max(longest, len(measured.lengths) * longest // 3))  # type: ignore[no-any-return]
