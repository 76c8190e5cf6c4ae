"""Units that are not what the loss divides by: which count makes the gradient exact?"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, Literal

from torch import Tensor, nn

from anybatch.core import Batch, Objective, TermLosses, children, count_units, is_array, num_rows
from anybatch.objectives import ObservedMeans, observed
from anybatch.verification.case import Case, Experiments, best_weights, shares_of
from anybatch.verification.causes.changes import Repair
from anybatch.verification.verdict import Cause, CutResult


@dataclass(frozen=True, slots=True)
class Count:
    """A way to count units, and what it gives for each micro-batch."""

    name: str
    code: str
    """How to write it as `units=`, a function of the batch."""
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
        told = (
            "The loss is a sum over rows, not a mean: losses of micro-batches add up to the whole batch's as they are"
        )
        cause = Cause(
            kind="sum",
            explanation=_falls(told, before, after),
            fix="Say so: Objective(loss, units, reduction='sum'), or supervised() with a criterion of reduction='sum'; or "
            "return the mean.",
        )
    else:
        told = "The objective says reduction='sum', but its loss is a mean: added up it is too large"
        cause = Cause(
            kind="mean", explanation=_falls(told, before, after), fix="Leave reduction at 'mean', or return the sum."
        )
    return cause, repaired, after


def find_units(experiments: Experiments, before: CutResult) -> Repair | None:
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
        _first_that_fits(experiments, before, objective, counts(experiments), used, wanted)
        or _seen(experiments, before, objective, used)
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
        repaired = with_units(experiments.case, objective, count.values)
        after = experiments.try_out(repaired)
        if after.is_exact:
            told = f"The mean loss does not divide by the units given, but by {count.name}: {_weighs(used, shares)}"
            cause = Cause(kind="units", explanation=_falls(told, before, after), fix=f"Give units={count.code}.")
            return cause, repaired, after
    return None


def _seen(experiments: Experiments, before: CutResult, objective: Objective, used: Sequence[float]) -> Repair | None:
    """Let the units be seen while the loss runs."""
    repaired = replace(experiments.case, objective=observed(objective.loss))
    after = experiments.try_out(repaired)
    is_right = after.is_exact and experiments.try_out(repaired, experiments.trained).is_exact
    if not is_right:
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


def _falls(explanation: str, before: CutResult, after: CutResult) -> str:
    return f"{explanation}. So counted, the error falls from {before.error:.1e} to {after.error:.1e}."


IGNORED = (-100, 0, -1, 255, 1)
"""Values that a target may be ignored by, the likeliest first; the commonest of each tensor and its extremes are tried too."""


def counts(experiments: Experiments) -> Iterator[Count]:
    """The likeliest first: rows, targets, shifted targets, weights, elements."""
    parts = experiments.cut.micro_batches
    yield Count("its rows", "anybatch.rows", tuple(float(num_rows(part)) for part in parts))
    columns = _columns(experiments.case.batch, parts)
    whole = _whole_numbers(columns)
    values = {path: _ignored_values(column) for path, column in whole.items()}
    for ignored in dict.fromkeys([*IGNORED, *(value for held in values.values() for value in held)]):
        for path, column in whole.items():
            if ignored in values[path]:
                yield from _not_ignored(path, column, ignored)
    for path, column in columns.items():
        yield from _summed(path, column)
    for path, value in leaves(experiments.case.batch):
        if isinstance(value, list):
            held = [dict(leaves(part))[path] for part in parts]
            sums = tuple(float(sum(len(item) for item in items if hasattr(item, "__len__"))) for items in held)
            yield Count(f"the elements of {path}", f"lambda batch: sum(len(row) for row in {path})", sums)
    yield from _both(whole)


def looked_up_counts(experiments: Experiments) -> Iterator[Count]:
    """Weights that the loss looks up by hand, in a tensor that it holds."""
    whole = _whole_numbers(_columns(experiments.case.batch, experiments.cut.micro_batches))
    for name, table in experiments.case.held.small_tensors.items():
        if table.dim() == 1 and table.is_floating_point() and name.isidentifier():
            for path, column in whole.items():
                if all(bool(((tensor >= 0) & (tensor < len(table))).all()) for tensor in column):
                    values = tuple(float(table.double()[tensor.cpu()].sum()) for tensor in column)
                    yield Count(f"the sum of {name}[{path}]", f"lambda batch: {name}[{path}].sum()", values)


def _columns(batch: Batch, parts: Sequence[Batch]) -> dict[str, list[Tensor]]:
    paths = [path for path, value in leaves(batch) if isinstance(value, Tensor) and value.dim() > 0]
    return {path: [dict(leaves(part))[path] for part in parts] for path in paths}


def _whole_numbers(columns: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    return {path: column for path, column in columns.items() if not column[0].is_floating_point()}


def _ignored_values(column: Sequence[Tensor]) -> list[int]:
    seen = Counter(value for tensor in column for value in tensor.flatten().tolist())
    likely = [value for value in IGNORED if value in seen]
    return list(dict.fromkeys([*likely, *(value for value, _ in seen.most_common(8)), min(seen), max(seen)]))


def _not_ignored(path: str, column: Sequence[Tensor], ignored: int) -> Iterator[Count]:
    what, is_wide = f"the entries of {path} that are not {ignored}", column[0].dim() > 1
    if is_wide:
        yield Count(
            f"{what}, but for the first of each row, which nothing predicts",
            f"lambda batch: ({path}[:, 1:] != {ignored}).sum()",
            _of_each(column, lambda tensor: (tensor[:, 1:] != ignored).sum()),
        )
    values = _of_each(column, lambda tensor: (tensor != ignored).sum())
    yield Count(what, f"lambda batch: ({path} != {ignored}).sum()", values)
    if is_wide:
        values = _of_each(column, lambda tensor: (tensor != ignored).flatten(1).any(1).sum())
        code = f"lambda batch: ({path} != {ignored}).flatten(1).any(1).sum()"
        yield Count(f"the rows of {path} that are not all {ignored}", code, values)


def _of_each(column: Sequence[Tensor], count: Callable[[Tensor], float | Tensor]) -> tuple[float, ...]:
    return tuple(float(count(tensor)) for tensor in column)


def _summed(path: str, column: Sequence[Tensor]) -> Iterator[Count]:
    if all(bool((tensor >= 0).all()) for tensor in column) and not column[0].is_complex():
        values = _of_each(column, lambda tensor: tensor.double().sum())
        yield Count(f"the sum of {path}", f"lambda batch: {path}.sum()", values)
        if column[0].dim() > 1:
            later = _of_each(column, lambda tensor: tensor[:, 1:].double().sum())
            yield Count(f"the sum of {path} but for its first column", f"lambda batch: {path}[:, 1:].sum()", later)
    yield Count(f"the elements of {path}", f"lambda batch: {path}.numel()", _of_each(column, Tensor.numel))
    if column[0].is_floating_point():
        present = _of_each(column, lambda tensor: (~tensor.isnan()).sum())
        yield Count(f"the entries of {path} that are not nan", f"lambda batch: (~{path}.isnan()).sum()", present)
        positive = _of_each(column, lambda tensor: (tensor > 0).sum())
        yield Count(f"the entries of {path} above 0", f"lambda batch: ({path} > 0).sum()", positive)
        zero = _of_each(column, lambda tensor: (tensor == 0).sum())
        yield Count(f"the entries of {path} that are 0", f"lambda batch: ({path} == 0).sum()", zero)


def _both(whole: dict[str, list[Tensor]]) -> Iterator[Count]:
    """Entries that count in two tensors at once: targets that are there, and a mask that lets them through."""
    for (path, column), (other, masks) in permutations(whole.items(), 2):
        if any(a.shape != b.shape for a, b in zip(column, masks, strict=True)):
            continue
        passed = [(tensor != -100) & (mask != 0) for tensor, mask in zip(column, masks, strict=True)]
        name, code = f"the entries of {path} that {other} lets through", f"(({path} != -100) & ({other} != 0))"
        yield Count(name, f"lambda batch: {code}.sum()", _of_each(passed, Tensor.sum))
        if column[0].dim() > 1:
            later = _of_each(passed, lambda tensor: tensor[:, 1:].sum())
            yield Count(f"{name}, but for the first of each row", f"lambda batch: {code}[:, 1:].sum()", later)


def leaves(batch: Batch, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """(path, value) of every array, and of every list that holds no tensors of whole columns."""
    held = children(batch)
    if is_array(batch) or held is None:
        yield path, batch
    elif isinstance(batch, list):
        yield path, batch
        if batch and all(isinstance(item, Tensor) for item in batch):
            for step, child in held:
                yield from leaves(child, path + step)
    else:
        for step, child in held:
            yield from leaves(child, path + step)


def _first_divisor(experiments: Experiments, objective: Objective) -> tuple[list[float], bool]:
    """Divisor of the first of torch's mean losses in each micro-batch, and whether it was given class weights."""
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
    """Take each term by itself, as the one loss, and see which is not exact; then which units would make it so."""
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
        told = "" if found is None else f" {found[0].explanation}"
        fix = "what its mean divides by" if found is None else found[0].fix.removeprefix("Give units=").rstrip(".")
        return Cause(
            kind="units",
            explanation=f"The term {name!r} is not what its units say, by itself too.{told}",
            fix=f"Give the term {name!r} its right units in Terms(loss, units=...): {fix}.",
        )
    return None


def _only(objective: Objective, name: str) -> Any:
    def loss(model: nn.Module, batch: Batch) -> Any:
        returned: Any = objective.loss(model, batch)
        assert isinstance(returned, TermLosses)
        return returned.losses[name]

    return loss
