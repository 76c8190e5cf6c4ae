"""Experiments that find the cause of an error. Causes that would hide others are tried first."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from anybatch.verification.case import Experiments
from anybatch.verification.causes.changes import (
    Repair,
    find_batch_norm,
    find_changed_inputs,
    find_draws_outside_torch,
    find_mixed_rows,
    find_model_state,
    find_own_generator,
    why_unjudged,
)
from anybatch.verification.causes.coupling import (
    find_coupling,
    find_penalty,
    find_split_groups,
    find_trimming,
    find_uneven_touch,
    unknown_weights,
)
from anybatch.verification.causes.units import find_reduction, find_units, find_wrong_term
from anybatch.verification.verdict import Cause, CutResult

T = TypeVar("T")

REPAIRS: tuple[Callable[[Experiments, CutResult], Repair | None], ...] = (
    find_changed_inputs,
    find_model_state,
    find_batch_norm,
    find_reduction,
    find_units,
)
"""Experiments that change one thing and see whether the error disappears. A change that helped stays for the next."""
SIGNS: tuple[Callable[[Experiments], Cause | None], ...] = (
    find_wrong_term,
    find_split_groups,
    find_own_generator,
    find_penalty,
    find_uneven_touch,
    find_coupling,
)
"""Experiments that recognise a cause that no change can remove."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Causes of an error, or the reason why it could not be judged."""

    causes: tuple[Cause, ...] = ()
    unjudged: str = ""


def explain(experiments: Experiments, known: tuple[Cause, ...] = ()) -> Explanation:
    """Find why the cut does not give the whole batch's gradient; `known` are causes found already."""
    whole = experiments.floor.whole
    if not all(map(math.isfinite, (whole.loss, *whole.norms.values()))):
        return Explanation(causes=(_not_finite(experiments),))
    if any(cause.kind == "randomness" for cause in known):
        return Explanation(causes=known)
    noise = find_draws_outside_torch(experiments)
    if noise is not None:
        return Explanation(causes=(noise,))
    now = experiments.try_out(experiments.case)
    if experiments.is_drawn:
        quiet = _tried(Experiments.without_draws, experiments)
        still = None if quiet is None else quiet.try_out(quiet.case)
        is_exact = still is not None and still.is_exact
        if is_exact:
            mixed = find_mixed_rows(experiments, now.failure)
            known = known or (() if mixed is None else (mixed,))
        if is_exact or quiet is None or quiet.case.draws.strange:  # a draw inside a kernel cannot be switched off
            unjudged = "" if known else why_unjudged(experiments, is_exact_without=is_exact)
            return Explanation(causes=known, unjudged=unjudged)
        experiments, now = quiet, still or now
    return Explanation(causes=known + _causes(experiments, now))


def _causes(experiments: Experiments, now: CutResult) -> tuple[Cause, ...]:
    """Return one cause or more, `unknown` if no experiment finds one."""
    trimming = _tried(find_trimming, experiments)
    if trimming is not None:
        return (trimming,)
    causes: list[Cause] = []
    for repair in REPAIRS:
        found = _tried(repair, experiments, now)
        if found is not None:
            cause, case, now = found
            causes.append(cause)
            experiments = replace(experiments, case=case)
        if now.is_exact:
            return tuple(causes)
    for look in SIGNS:
        cause_seen = _tried(look, experiments)
        if cause_seen is not None and (now.failure is None or cause_seen.kind == "groups"):
            return (*causes, cause_seen)
    if now.failure is not None:
        failed = Cause(
            kind="error",
            explanation=f"The micro-batches could not run: {now.failure}",
            fix="Mend the error; it does not come when the whole batch runs in one go.",
        )
        return (*causes, failed)
    return tuple(causes) or (_unknown(experiments, now),)


def _tried(experiment: Callable[..., T | None], *given: Experiments | CutResult) -> T | None:
    """Run an experiment; None if its rows cannot run alone, as one row cannot in BatchNorm."""
    try:
        return experiment(*given)
    except Exception:  # any error of the model on a few rows
        return None


def _not_finite(experiments: Experiments) -> Cause:
    bad = [
        name
        for name, grad in experiments.floor.whole.parameters.items()
        if grad is not None and not grad.isfinite().all()
    ]
    return Cause(
        kind="nonfinite",
        explanation=f"The whole batch in one go has a loss of {experiments.floor.whole.loss} and gradients that are not finite "
        f"in {', '.join(bad[:3]) or 'no parameter'}: there is nothing to compare with.",
        fix="Verify with a batch whose loss is finite, or mend what makes it inf or nan first.",
    )


def _unknown(experiments: Experiments, now: CutResult) -> Cause:
    return Cause(
        kind="unknown",
        explanation=f"The error is {now.error:.2g}, and none of the experiments takes it away.{unknown_weights(experiments)}",
        fix="Give units=, a function of the batch that returns what the mean loss divides by, if it is not what was given.",
    )
