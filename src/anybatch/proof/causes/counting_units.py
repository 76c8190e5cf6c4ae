"""Units that are not what the loss divides by: which count makes the gradient exact?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from anybatch.batches import Batch, children, is_array, num_rows
from anybatch.objectives import FUNCTIONAL_RULES, Objective, ObservedMeans, count_units
from anybatch.proof.cases import Case
from anybatch.proof.causes.experiments import ExperimentResult, Experiments
from anybatch.proof.causes.leftover_state import Repair
from anybatch.proof.verdict import Cause

IGNORED = -100


@dataclass(frozen=True, slots=True)
class Count:
    """A way to count units, and what it gives for each micro-batch."""

    name: str
    code: str
    """How to write it as `units=`, a function of the batch."""
    values: tuple[float, ...]


def find_reduction(experiments: Experiments, before: ExperimentResult) -> Repair | None:
    """Add the micro-batches' losses up instead of averaging them, or the other way round."""
    objective = experiments.objective
    if objective is None:
        return None
    other: Literal["mean", "sum"] = "sum" if objective.reduction == "mean" else "mean"
    repaired = replace(experiments.case, objective=replace(objective, reduction=other))
    after = experiments.try_out(repaired)
    if not after.is_exact:
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
    """Try every count that the batch and the loss functions suggest, and see with which the error goes."""
    objective = experiments.objective
    if objective is None or objective.reduction == "sum":
        return None
    used = _shares(count_units(objective, experiments.case.model, experiments.cut.micro_batches))
    tried = [used]
    for count in counts(experiments):
        shares = _shares(count.values)
        if any(_alike(shares, other) for other in tried):
            continue
        tried.append(shares)
        repaired = with_units(experiments.case, objective, count.values)
        after = experiments.try_out(repaired)
        if after.is_exact:
            now, wanted = (" ".join(f"{share:.3f}" for share in each) for each in (used, shares))
            explanation = (
                f"The mean loss does not divide by the units given, but by {count.name}: micro-batches weigh {now} and should "
                f"weigh {wanted}"
            )
            fix = f"Give units={count.code}."
            return Cause(kind="units", explanation=_falls(explanation, before, after), fix=fix), repaired, after
    return None


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


def counts(experiments: Experiments) -> Iterator[Count]:
    """What a mean may divide by, the likeliest first: rows, targets, shifted targets, weights, elements."""
    parts = experiments.cut.micro_batches
    yield Count("its rows", "anybatch.rows", tuple(float(num_rows(part)) for part in parts))
    yield from _counted_tensors(experiments.case.batch, parts)
    yield from _observed(experiments)


def _counted_tensors(batch: Batch, parts: Sequence[Batch]) -> Iterator[Count]:
    paths = [path for path, value in leaves(batch) if isinstance(value, Tensor) and value.dim() > 0]
    columns = {path: [dict(leaves(part))[path] for part in parts] for path in paths}
    whole = {path: column for path, column in columns.items() if not column[0].is_floating_point()}
    for ignored in (IGNORED, 0):
        for path, column in whole.items():
            if any(bool((tensor == ignored).any()) for tensor in column):
                yield from _not_ignored(path, column, ignored)
    for path, column in columns.items():
        if column[0].is_floating_point() and all(bool((tensor >= 0).all()) for tensor in column):
            values = tuple(float(tensor.double().sum()) for tensor in column)
            yield Count(f"the sum of {path}", f"lambda batch: {path}.sum()", values)
        yield Count(f"the elements of {path}", f"lambda batch: {path}.numel()", tuple(float(t.numel()) for t in column))
    for path, value in leaves(batch):
        if isinstance(value, list):
            held = [dict(leaves(part))[path] for part in parts]
            sums = tuple(float(sum(len(item) for item in items if hasattr(item, "__len__"))) for items in held)
            yield Count(f"the elements of {path}", f"lambda batch: sum(len(row) for row in {path})", sums)


def _not_ignored(path: str, column: list[Tensor], ignored: int) -> Iterator[Count]:
    what = f"the entries of {path} that are not {ignored}"
    if column[0].dim() > 1:
        shifted = [tensor[:, 1:] for tensor in column]
        more = f"{what}, but for the first of each row, which nothing predicts"
        yield _count(more, f"({path}[:, 1:] != {ignored}).sum()", shifted, ignored)
    yield _count(what, f"({path} != {ignored}).sum()", column, ignored)


def _count(name: str, expression: str, column: list[Tensor], ignored: int) -> Count:
    return Count(name, f"lambda batch: {expression}", tuple(float((tensor != ignored).sum()) for tensor in column))


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


def _observed(experiments: Experiments) -> Iterator[Count]:
    """What torch's own mean losses were seen to divide by, one count for each call in the forward."""
    objective = experiments.objective
    assert objective is not None
    seen: list[_Weighted] = []

    def loss(model: nn.Module, batch: Batch) -> Any:
        with _Weighted() as observed:
            seen.append(observed)
            return objective.loss(model, batch)

    spied = replace(experiments.case, objective=replace(objective, loss=loss))
    for part, rows in zip(experiments.cut, experiments.cut.row_numbers, strict=True):
        spied.once(part, rows)
    if len({len(observed.units) for observed in seen}) != 1:
        return
    for call in range(len(seen[0].units)):
        values = tuple(float(observed.units[call]) for observed in seen)
        if seen[0].is_weighted[call]:
            name = "the summed class weights of its targets"
            code = (
                "lambda batch: weight[targets(batch)].sum(), or use supervised(nn.CrossEntropyLoss(weight=weight)), which "
                "counts so"
            )
        else:
            name, code = (
                "what its loss function was seen to divide by",
                "a count of exactly the targets that the loss function gets",
            )
        yield Count(name, code, values)


class _Weighted(ObservedMeans):
    """Sees too whether a loss function was given class weights."""

    def __init__(self) -> None:
        super().__init__()
        self.is_weighted: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self.units)
        result = super().__torch_function__(func, types, args, kwargs)
        if func in FUNCTIONAL_RULES and len(self.units) > before:
            weight = (kwargs or {}).get("weight", args[2] if len(args) > 2 else None)
            self.is_weighted.append(isinstance(weight, Tensor))
        return result


def best_weights(experiments: Experiments) -> tuple[list[float], float]:
    """The weights of the micro-batches' gradients that come nearest to the whole batch's, and how far away that still is.

    min over w of |whole - sum_k w_k g_k| / |whole|
    """
    each = experiments.each_alone()
    vectors: list[list[Tensor]] = [[] for _ in (*each, "whole")]
    for name, whole in experiments.floor.whole.parameters.items():
        grads = [*(gradient[name] for gradient in each), whole]
        known = next((grad for grad in grads if grad is not None), None)
        for vector, grad in zip(vectors, grads, strict=True):
            if known is not None:
                vector.append((torch.zeros_like(known) if grad is None else grad).flatten())
    *columns, wanted = (torch.cat(vector) for vector in vectors)
    matrix = torch.stack(columns, dim=1)
    solution = torch.linalg.lstsq(matrix, wanted.unsqueeze(1)).solution.flatten()
    return solution.tolist(), float((matrix @ solution - wanted).norm() / wanted.norm())


def _shares(values: Sequence[float]) -> list[float]:
    total = sum(values)
    return [value / total for value in values] if total else list(values)


def _alike(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(abs(a - b) <= 1e-12 for a, b in zip(one, other, strict=True))


def _falls(explanation: str, before: ExperimentResult, after: ExperimentResult) -> str:
    return f"{explanation}. So counted, the error falls from {before.error:.1e} to {after.error:.1e}."
