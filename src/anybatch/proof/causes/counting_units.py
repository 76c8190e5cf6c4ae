"""Units that are not what the loss divides by: which count makes the gradient exact?"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from anybatch.batches import Batch
from anybatch.objectives import Objective, count_units, observed
from anybatch.proof.cases import Case
from anybatch.proof.causes.experiments import ExperimentResult, Experiments
from anybatch.proof.causes.leftover_state import Repair
from anybatch.proof.causes.possible_counts import Count, counts, looked_up_counts, seen_means
from anybatch.proof.causes.weighing_parts import best_weights, shares_of
from anybatch.proof.cuts import interleaved_cut
from anybatch.proof.verdict import Cause

Suggest = Callable[[Experiments], Iterator[Count]]


def find_reduction(experiments: Experiments, before: ExperimentResult) -> Repair | None:
    """Add the micro-batches' losses up instead of averaging them, or the other way round."""
    objective = experiments.objective
    if objective is None or objective.terms:
        return None
    reduction = (
        objective.reduction if objective.reduction_for is None else objective.reduction_for(experiments.case.model)
    )
    other: Literal["mean", "sum"] = "sum" if reduction == "mean" else "mean"
    repaired = replace(experiments.case, objective=replace(objective, reduction=other, reduction_for=None))
    after = experiments.try_out(repaired)
    if not after.is_exact:
        best = best_weights(experiments) if other == "mean" else None
        if best is None or not (best.fits and best.is_mean):
            return None
    if other == "sum":
        explanation = (
            "The loss is a sum over rows, not a mean: losses of micro-batches add up to the whole batch's as they are"
        )
        fix = (
            "Say so: Objective(loss, units, reduction='sum'), or supervised() with a criterion of reduction='sum'; or return "
            "the mean."
        )
        return Cause(kind="sum", explanation=_falls(explanation, before, after), fix=fix), repaired, after
    explanation = "The objective says reduction='sum', but its loss is a mean: added up it is too large"
    fix = "Leave reduction at 'mean', or return the sum."
    return Cause(kind="mean", explanation=_falls(explanation, before, after), fix=fix), repaired, after


def find_units(experiments: Experiments, before: ExperimentResult) -> Repair | None:
    """Try every count that the batch and the loss functions suggest, and see with which the error goes.

    Which weights would be right is found by least squares first: only counts that give them are tried. Where no weights that
    sum to 1 would do, no count does.
    """
    objective = experiments.objective
    if objective is None or objective.terms or objective.reduction == "sum":
        return None
    best = best_weights(experiments)
    is_known = best is not None and best.is_unique
    if best is not None and is_known and not (best.fits and best.is_mean):
        return None
    used = shares_of(count_units(objective, experiments.case.model, experiments.cut.micro_batches))
    wanted = best.weights if best is not None and is_known else None
    return (
        _first_that_fits(experiments, before, counts, used, wanted)
        or _seen(experiments, before, objective, used)
        or _first_that_fits(experiments, before, looked_up_counts, used, wanted)
    )


def _first_that_fits(
    experiments: Experiments,
    before: ExperimentResult,
    suggest: Suggest,
    used: Sequence[float],
    wanted: Sequence[float] | None,
) -> Repair | None:
    tried = [used]
    for count in suggest(experiments):
        shares = shares_of(count.values)
        is_possible = wanted is None or all(abs(one - other) <= 1e-5 for one, other in zip(wanted, shares, strict=True))
        if is_possible and not any(_alike(shares, other) for other in tried):
            tried.append(shares)
            found = _with_count(experiments, before, suggest, count, used)
            if found is not None:
                return found
    return None


def _with_count(
    experiments: Experiments, before: ExperimentResult, suggest: Suggest, count: Count, used: Sequence[float]
) -> Repair | None:
    objective = experiments.objective
    assert objective is not None
    repaired = with_units(experiments.case, objective, count.values)
    after = experiments.try_out(repaired)
    if not after.is_exact:
        return None
    weighs = _weighs(used, shares_of(count.values))
    explanation = f"The mean loss does not divide by the units given, but by {count.name}: {weighs}"
    fix = f"Give units={count.code}."
    return Cause(kind="units", explanation=_falls(explanation, before, after), fix=fix), repaired, after


def _seen(
    experiments: Experiments, before: ExperimentResult, objective: Objective, used: Sequence[float]
) -> Repair | None:
    """Let the units be seen while the loss runs."""
    repaired = replace(experiments.case, objective=observed(objective.loss))
    after = experiments.try_out(repaired)
    is_right = after.is_exact and experiments.try_out(repaired, experiments.trained).is_exact
    means = seen_means(experiments) if is_right else []
    if not means:
        return None
    by = "the summed class weights of its targets" if means[0].is_weighted else "what only the forward knows"
    shares = shares_of(means[0].values)
    explanation = f"The mean loss does not divide by the units given, but by {by}: {_weighs(used, shares)}"
    fix = (
        "Use observed(loss) in place of Objective(loss, units): it sees what torch's loss function divides by. A criterion "
        "that says it, supervised(nn.CrossEntropyLoss(weight=weight)), does as well."
        if means[0].is_weighted
        else "Use observed(loss) in place of Objective(loss, units): it sees what the loss divides by while it runs."
    )
    return Cause(kind="units", explanation=_falls(explanation, before, after), fix=fix), repaired, after


def _holds_elsewhere(experiments: Experiments, objective: Objective, suggest: Suggest, name: str) -> bool:
    """Whether the count is right for other micro-batches too: two numbers may agree by chance."""
    other = replace(experiments, cut=interleaved_cut(experiments.case.batch))
    same = next(found for found in suggest(other) if found.name == name)
    result = other.try_out(with_units(experiments.case, objective, same.values))
    return result.is_exact or result.failure is not None


def with_units(case: Case, objective: Objective, values: Sequence[float]) -> Case:
    """The case whose micro-batches count so much, in order."""
    # units are counted in order, once per run; a run starts from the first again
    position: Iterator[float] = iter(())

    def next_units(batch: Batch) -> float:
        nonlocal position
        try:
            return next(position)
        except StopIteration:
            position = iter(values)
            return next(position)

    return replace(case, objective=replace(objective, units=next_units, units_for=None))


def _alike(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(abs(a - b) <= 1e-12 for a, b in zip(one, other, strict=True))


def _weighs(used: Sequence[float], wanted: Sequence[float]) -> str:
    now, right = (" ".join(f"{share:.3f}" for share in shares) for shares in (used, wanted))
    return f"micro-batches weigh {now} and should weigh {right}"


def _falls(explanation: str, before: ExperimentResult, after: ExperimentResult) -> str:
    return f"{explanation}. So counted, the error falls from {before.error:.1e} to {after.error:.1e}."
