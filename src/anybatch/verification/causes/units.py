"""Wrong units or reduction: search for the count that makes the gradient exact."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, permutations
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from anybatch.core import Batch, Objective, TermLosses, children, count_units, is_array, map_tensors, num_rows
from anybatch.objectives import ObservedMeans, observed
from anybatch.verification.case import Experiments, best_weights, shares_of
from anybatch.verification.causes.changes import Repair
from anybatch.verification.precision import raised
from anybatch.verification.verdict import Cause, CutResult


class Count(NamedTuple):
    """A way to count units, and its result for each micro-batch."""

    name: str
    code: str
    """The function of the batch to write as `units=`."""
    values: tuple[float, ...]


def find_reduction(experiments: Experiments, before: CutResult) -> Repair | None:
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
        text = (
            "The loss is a sum over rows, not a mean: losses of micro-batches add up to the whole batch's as they are"
        )
        fix = (
            "Say so: Objective(loss, units, reduction='sum'), or supervised() with a criterion of reduction='sum'; or "
            "return the mean."
        )
    else:
        text = "The objective says reduction='sum', but its loss is a mean: added up it is too large"
        fix = "Leave reduction at 'mean', or return the sum."
    cause = Cause(kind="sum" if other == "sum" else "mean", explanation=_falls(text, before, after), fix=fix)
    return cause, repaired, after


def find_units(experiments: Experiments, before: CutResult) -> Repair | None:
    """Try the counts that the batch and the loss functions suggest until one makes the gradient exact.

    Least squares gives the right weights first, and only counts with these weights are tried. If no weights that sum to 1
    are right, no count is.
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
        _first_that_fits(experiments, before, objective, counts(experiments), used, wanted)
        or _observed(experiments, before, objective, used)
        or _first_that_fits(experiments, before, objective, looked_up_counts(experiments), used, wanted)
    )


def _first_that_fits(
    experiments: Experiments,
    before: CutResult,
    objective: Objective,
    suggested: Iterator[Count],
    used: Sequence[float],
    wanted: Sequence[float] | None,
) -> Repair | None:
    tried = [used]
    for count in suggested:
        shares = shares_of(count.values)
        is_possible = wanted is None or all(abs(one - other) <= 1e-5 for one, other in zip(wanted, shares, strict=True))
        if not is_possible or any(_alike(shares, other) for other in tried):
            continue
        tried.append(shares)
        repaired = replace(
            experiments.case, objective=replace(objective, units=_in_order(count.values), units_for=None)
        )
        after = experiments.try_out(repaired)
        if after.is_exact:
            text = f"The mean loss does not divide by the units given, but by {count.name}: {_weighs(used, shares)}"
            cause = Cause(kind="units", explanation=_falls(text, before, after), fix=f"Give units={count.code}.")
            return cause, repaired, after
    return None


def _observed(
    experiments: Experiments, before: CutResult, objective: Objective, used: Sequence[float]
) -> Repair | None:
    """Let `observed` see the units while the loss runs."""
    repaired = replace(experiments.case, objective=observed(objective.loss))
    after = experiments.try_out(repaired)
    if not after.is_exact or not experiments.try_out(repaired, experiments.trained).is_exact:
        return None
    values, is_weighted = _first_divisor(experiments, objective)
    by = "the summed class weights of its targets" if is_weighted else "what only the forward knows"
    explanation = f"The mean loss does not divide by the units given, but by {by}: {_weighs(used, shares_of(values))}"
    fix = "Use observed(loss) in place of Objective(loss, units): it sees what the loss divides by while it runs."
    if is_weighted:
        fix = (
            "Use observed(loss) in place of Objective(loss, units): it sees what torch's loss function divides by. A "
            "criterion that says it, supervised(nn.CrossEntropyLoss(weight=weight)), does as well."
        )
    return Cause(kind="units", explanation=_falls(explanation, before, after), fix=fix), repaired, after


def _in_order(values: Sequence[float]) -> Callable[[Batch], float]:
    """Return units that count the micro-batches of a run in order, and start again with the next run."""
    left = cycle(values)
    return lambda batch: next(left)


def _alike(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(abs(a - b) <= 1e-12 for a, b in zip(one, other, strict=True))


def _weighs(used: Sequence[float], wanted: Sequence[float]) -> str:
    now, right = (" ".join(f"{share:.3f}" for share in shares) for shares in (used, wanted))
    return f"micro-batches weigh {now} and should weigh {right}"


def _falls(explanation: str, before: CutResult, after: CutResult) -> str:
    return f"{explanation}. So counted, the error falls from {before.error:.1e} to {after.error:.1e}."


IGNORED = (-100, 0, -1, 255, 1)
"""Usual values of ignored targets, the likeliest first; the commonest and the extreme values of each tensor follow."""
Suggestion = tuple[str, str]
"""Name of a count, and its code as a function of the batch."""


def counts(experiments: Experiments) -> Iterator[Count]:
    """Yield the likeliest counts first: rows, targets, shifted targets, weights, elements."""
    parts = experiments.cut.micro_batches
    yield Count("its rows", "anybatch.rows", tuple(float(num_rows(part)) for part in parts))
    columns = _columns(experiments.case.batch, parts)
    whole = {path: column for path, column in columns.items() if not column[0].is_floating_point()}
    lists = [path for path, value in leaves(experiments.case.batch) if isinstance(value, list)]
    by_length = [(f"the elements of {path}", f"lambda batch: sum(len(row) for row in {path})") for path in lists]
    yield from _counted(parts, [*_not_ignored(whole), *_sums(columns), *by_length, *_both(whole)])


def looked_up_counts(experiments: Experiments) -> Iterator[Count]:
    """Yield sums of weights that the loss looks up by hand, in a tensor that it holds."""
    parts = experiments.cut.micro_batches
    for name, table in experiments.case.held.small_tensors.items():
        if table.dim() == 1 and table.is_floating_point() and name.isidentifier():
            found = [
                (f"the sum of {name}[{path}]", f"lambda batch: {name}[{path}].sum()")
                for path, column in _columns(experiments.case.batch, parts).items()
                if not column[0].is_floating_point()
                and all(bool(((one >= 0) & (one < len(table))).all()) for one in column)
            ]
            yield from _counted(parts, found, {name: raised(table.cpu())})


def _counted(
    parts: Sequence[Batch], found: Sequence[Suggestion], names: Mapping[str, Any] | None = None
) -> Iterator[Count]:
    """Count each micro-batch by the suggested code, in float64 on the CPU."""
    own = [map_tensors(part, lambda tensor: raised(tensor.cpu())) for part in parts]
    for name, code in found:
        try:
            count = eval(code, dict(names or {}))
            values = tuple(float(count(part)) for part in own)
        except Exception:  # rows that have no length, for example
            continue
        yield Count(name, code, values)


def _columns(batch: Batch, parts: Sequence[Batch]) -> dict[str, list[Tensor]]:
    paths = [path for path, value in leaves(batch) if isinstance(value, Tensor) and value.dim() > 0]
    return {path: [dict(leaves(part))[path] for part in parts] for path in paths}


def _not_ignored(whole: Mapping[str, Sequence[Tensor]]) -> Iterator[Suggestion]:
    likely: dict[str, list[int]] = {}
    for path, column in whole.items():
        seen = Counter(value for tensor in column for value in tensor.flatten().tolist())
        usual = [value for value in IGNORED if value in seen]
        common = [value for value, _ in seen.most_common(8)]
        likely[path] = list(dict.fromkeys([*usual, *common, min(seen), max(seen)]))
    for ignored in dict.fromkeys([*IGNORED, *(value for values in likely.values() for value in values)]):
        for path in [path for path, values in likely.items() if ignored in values]:
            name, is_wide = f"the entries of {path} that are not {ignored}", whole[path][0].dim() > 1
            if is_wide:
                first = f"{name}, but for the first of each row, which nothing predicts"
                yield first, f"lambda batch: ({path}[:, 1:] != {ignored}).sum()"
            yield name, f"lambda batch: ({path} != {ignored}).sum()"
            if is_wide:
                rows = f"the rows of {path} that are not all {ignored}"
                yield rows, f"lambda batch: ({path} != {ignored}).flatten(1).any(1).sum()"


def _sums(columns: Mapping[str, Sequence[Tensor]]) -> Iterator[Suggestion]:
    for path, column in columns.items():
        if not column[0].is_complex() and all(bool((tensor >= 0).all()) for tensor in column):
            yield f"the sum of {path}", f"lambda batch: {path}.sum()"
            if column[0].dim() > 1:
                yield f"the sum of {path} but for its first column", f"lambda batch: {path}[:, 1:].sum()"
        yield f"the elements of {path}", f"lambda batch: {path}.numel()"
        if column[0].is_floating_point():
            yield f"the entries of {path} that are not nan", f"lambda batch: (~{path}.isnan()).sum()"
            yield f"the entries of {path} above 0", f"lambda batch: ({path} > 0).sum()"
            yield f"the entries of {path} that are 0", f"lambda batch: ({path} == 0).sum()"


def _both(whole: Mapping[str, Sequence[Tensor]]) -> Iterator[Suggestion]:
    """Suggest entries that count in two tensors at once: targets that are not ignored, and a mask."""
    for (path, column), (other, masks) in permutations(whole.items(), 2):
        if all(one.shape == mask.shape for one, mask in zip(column, masks, strict=True)):
            name, code = f"the entries of {path} that {other} lets through", f"(({path} != -100) & ({other} != 0))"
            yield name, f"lambda batch: {code}.sum()"
            if column[0].dim() > 1:
                yield f"{name}, but for the first of each row", f"lambda batch: {code}[:, 1:].sum()"


def leaves(batch: Batch, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of every array and every list; of lists, only those of tensors are entered."""
    held = None if is_array(batch) else children(batch)
    if held is None or isinstance(batch, list):
        yield path, batch
    if held is not None and (not isinstance(batch, list) or all(isinstance(item, Tensor) for item in batch)):
        for step, child in held:
            yield from leaves(child, path + step)


def _first_divisor(experiments: Experiments, objective: Objective) -> tuple[list[float], bool]:
    """Return the divisor of the first of torch's mean losses in each micro-batch, and whether it had class weights."""
    seen: list[ObservedMeans] = []

    def loss(model: nn.Module, batch: Batch) -> Any:
        with ObservedMeans() as watched:
            seen.append(watched)
            return objective.loss(model, batch)

    spied = replace(experiments.case, objective=replace(objective, loss=loss))
    for part, rows in zip(experiments.cut, experiments.cut.row_numbers, strict=True):
        spied.once(part, rows)
    if len({len(watched.units) for watched in seen}) != 1 or not seen[0].units:
        return [float(len(rows)) for rows in experiments.cut.row_numbers], False
    call = seen[0].calls[0]
    return [float(watched.units[0]) for watched in seen], call is not None and call.is_weighted


def find_wrong_term(experiments: Experiments) -> Cause | None:
    """Run each term by itself as the only loss; name the first that is not exact, and its units."""
    objective = experiments.objective
    if objective is None or not objective.terms:
        return None
    for name, units in objective.terms.items():
        alone = replace(experiments.case, objective=Objective(_only(objective, name), units or (lambda batch: 1)))
        one = replace(experiments, case=alone, floor=replace(experiments.floor, whole=alone.whole()))
        now = one.try_out(alone)
        if now.is_exact:
            continue
        if units is None:
            return Cause(
                kind="units",
                explanation=f"The term {name!r} is given units=None, which is for a penalty that is the same for all rows; "
                "but it is a mean over rows: it differs from micro-batch to micro-batch.",
                fix=f"Give the term {name!r} its units, what its mean divides by, in Terms(loss, units=...).",
            )
        found = find_units(one, now)
        text = "" if found is None else f" {found[0].explanation}"
        fix = "what its mean divides by" if found is None else found[0].fix.removeprefix("Give units=").rstrip(".")
        return Cause(
            kind="units",
            explanation=f"The term {name!r} is not what its units say, by itself too.{text}",
            fix=f"Give the term {name!r} its right units in Terms(loss, units=...): {fix}.",
        )
    return None


def _only(objective: Objective, name: str) -> Callable[[nn.Module, Batch], Tensor]:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        returned: Any = objective.loss(model, batch)
        assert isinstance(returned, TermLosses)
        return returned.losses[name]

    return loss
