"""Causes by experiment, the ones that would blur others first."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from anybatch.proof.causes.batch_statistics import batch_norm
from anybatch.proof.causes.counting_units import reduction, units
from anybatch.proof.causes.coupling import coupled, touched, unknown_weights
from anybatch.proof.causes.experiments import Lab, Outcome
from anybatch.proof.causes.leftover_state import Found, changed_inputs, model_state, own_generator
from anybatch.proof.causes.randomness import not_by_row, outside_torch
from anybatch.proof.cuts import untrimmed
from anybatch.proof.verdict import Cause

T = TypeVar("T")

REPAIRS: tuple[Callable[[Lab, Outcome], Found | None], ...] = (
    changed_inputs,
    model_state,
    batch_norm,
    reduction,
    units,
)
"""Experiments that change one thing and look whether the error goes; what helped stays changed for the next."""
SIGNS: tuple[Callable[[Lab], Cause | None], ...] = (not_by_row, own_generator, touched, coupled)
"""Experiments that look for the mark of a cause that cannot be taken away."""


def explain(lab: Lab) -> tuple[Cause, ...]:
    """Why the lab's cut does not give the whole batch's gradient; at least one cause."""
    if not math.isfinite(lab.floor.whole.loss) or not math.isfinite(lab.floor.whole.norm):
        return (_not_finite(lab),)
    noise = outside_torch(lab)
    if noise is not None:
        return (noise,)
    now = lab.try_out(lab.case)
    causes: list[Cause] = []
    trimming = _trimming(lab)
    if trimming is not None:
        return (trimming,)
    for repair in REPAIRS:
        found = _tried(repair, lab, now)
        if found is not None:
            cause, case, now = found
            causes.append(cause)
            lab = replace(lab, case=case)
        if now.is_exact:
            return tuple(causes)
    if now.failure is not None:
        return (*causes, _failed(now.failure))
    for look in SIGNS:
        cause_seen = _tried(look, lab)
        if cause_seen is not None:
            return (*causes, cause_seen)
    return (*causes, _unknown(lab, now)) if not causes else tuple(causes)


def _tried(experiment: Callable[..., T | None], *given: Lab | Outcome) -> T | None:
    """What an experiment finds; nothing where its few rows cannot run alone, such as a single one in BatchNorm."""
    try:
        return experiment(*given)
    except Exception:  # whatever a model raises on a few rows
        return None


def _trimming(lab: Lab) -> Cause | None:
    """Leave the padding in, and see whether the error goes."""
    if lab.cut.cut is None or not lab.try_out(lab.case, untrimmed(lab.case.batch, lab.cut)).is_exact:
        return None
    return Cause(
        kind="padding",
        explanation="The gradient changes when padding is cut off, and is exact when the same rows keep it: the model "
        "or the loss looks at padding.",
        fix="Mask padding in the model and ignore it in the loss; or cut by rows, Rows(n), which leaves padding in.",
    )


def _not_finite(lab: Lab) -> Cause:
    bad = [name for name, grad in lab.floor.whole.parameters.items() if grad is not None and not grad.isfinite().all()]
    return Cause(
        kind="nonfinite",
        explanation=f"The whole batch in one go has a loss of {lab.floor.whole.loss} and gradients that are not finite "
        f"in {', '.join(bad[:3]) or 'no parameter'}: there is nothing to compare with.",
        fix="Verify with a batch whose loss is finite, or mend what makes it inf or nan first.",
    )


def _failed(failure: str) -> Cause:
    return Cause(
        kind="error",
        explanation=f"The micro-batches could not run: {failure}",
        fix="Mend the error; it does not come when the whole batch runs in one go.",
    )


def _unknown(lab: Lab, now: Outcome) -> Cause:
    return Cause(
        kind="unknown",
        explanation=f"The error is {now.error:.2g}, and none of the experiments takes it away.{unknown_weights(lab)}",
        fix="Give units=, a function of the batch that returns what the mean loss divides by, if it is not what was given.",
    )
