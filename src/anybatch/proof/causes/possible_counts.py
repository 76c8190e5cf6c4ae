"""What a mean may divide by: every count that a batch and torch's loss functions suggest, each as code to be given."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from anybatch.batches import Batch, children, is_array, num_rows
from anybatch.objectives import ObservedMeans
from anybatch.proof.causes.experiments import Experiments

IGNORED = (-100, 0, -1, 255, 1)
"""Values that a target may be ignored by, the likeliest first; the commonest of each tensor and its extremes are tried too."""


@dataclass(frozen=True, slots=True)
class Count:
    """A way to count units, and what it gives for each micro-batch."""

    name: str
    code: str
    """How to write it as `units=`, a function of the batch."""
    values: tuple[float, ...]


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
    for name, table in experiments.case.held.python.tables_of_numbers.items():
        if table.dim() == 1 and table.is_floating_point() and name.isidentifier():
            for path, column in whole.items():
                yield from _looked_up(name, table, path, column)


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
    what = f"the entries of {path} that are not {ignored}"
    if column[0].dim() > 1:
        yield _count(
            f"{what}, but for the first of each row, which nothing predicts",
            f"({path}[:, 1:] != {ignored}).sum()",
            [tensor[:, 1:] for tensor in column],
            ignored,
        )
    yield _count(what, f"({path} != {ignored}).sum()", column, ignored)
    if column[0].dim() > 1:
        values = tuple(float((tensor != ignored).flatten(1).any(1).sum()) for tensor in column)
        code = f"lambda batch: ({path} != {ignored}).flatten(1).any(1).sum()"
        yield Count(f"the rows of {path} that are not all {ignored}", code, values)


def _count(name: str, expression: str, column: Sequence[Tensor], ignored: int) -> Count:
    return Count(name, f"lambda batch: {expression}", tuple(float((tensor != ignored).sum()) for tensor in column))


def _summed(path: str, column: Sequence[Tensor]) -> Iterator[Count]:
    if all(bool((tensor >= 0).all()) for tensor in column) and not column[0].is_complex():
        values = tuple(float(tensor.double().sum()) for tensor in column)
        yield Count(f"the sum of {path}", f"lambda batch: {path}.sum()", values)
        if column[0].dim() > 1:
            later = tuple(float(tensor[:, 1:].double().sum()) for tensor in column)
            yield Count(f"the sum of {path} but for its first column", f"lambda batch: {path}[:, 1:].sum()", later)
    yield Count(f"the elements of {path}", f"lambda batch: {path}.numel()", tuple(float(t.numel()) for t in column))
    if column[0].is_floating_point():
        present = tuple(float((~tensor.isnan()).sum()) for tensor in column)
        yield Count(f"the entries of {path} that are not nan", f"lambda batch: (~{path}.isnan()).sum()", present)
        positive = tuple(float((tensor > 0).sum()) for tensor in column)
        yield Count(f"the entries of {path} above 0", f"lambda batch: ({path} > 0).sum()", positive)
        zero = tuple(float((tensor == 0).sum()) for tensor in column)
        yield Count(f"the entries of {path} that are 0", f"lambda batch: ({path} == 0).sum()", zero)


def _looked_up(name: str, table: Tensor, path: str, column: Sequence[Tensor]) -> Iterator[Count]:
    if all(bool(((tensor >= 0) & (tensor < len(table))).all()) for tensor in column):
        values = tuple(float(table.double()[tensor.cpu()].sum()) for tensor in column)
        yield Count(f"the sum of {name}[{path}]", f"lambda batch: {name}[{path}].sum()", values)


def _both(whole: dict[str, list[Tensor]]) -> Iterator[Count]:
    """Entries that count in two tensors at once: targets that are there, and a mask that lets them through."""
    for path, column in whole.items():
        for other, masks in whole.items():
            if path == other or any(a.shape != b.shape for a, b in zip(column, masks, strict=True)):
                continue
            pairs = list(zip(column, masks, strict=True))
            values = tuple(float(((tensor != -100) & (mask != 0)).sum()) for tensor, mask in pairs)
            code = f"(({path} != -100) & ({other} != 0)).sum()"
            yield Count(f"the entries of {path} that {other} lets through", f"lambda batch: {code}", values)
            if column[0].dim() > 1:
                later = tuple(float(((t != -100) & (mask != 0))[:, 1:].sum()) for t, mask in pairs)
                code = f"(({path} != -100) & ({other} != 0))[:, 1:].sum()"
                name = f"the entries of {path} that {other} lets through, but for the first of each row"
                yield Count(name, f"lambda batch: {code}", later)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenMean:
    """One call of a mean-reducing loss function of torch's, and what it divided by in each micro-batch."""

    values: tuple[float, ...]
    is_weighted: bool
    """Whether it was given class weights."""


def seen_means(experiments: Experiments) -> list[SeenMean]:
    """What torch's own mean losses were seen to divide by, one for each call in the forward."""
    objective = experiments.objective
    assert objective is not None
    seen: list[_Weighted] = []

    def loss(model: nn.Module, batch: Batch) -> Any:
        with _Weighted() as watched:
            seen.append(watched)
            return objective.loss(model, batch)

    spied = replace(experiments.case, objective=replace(objective, loss=loss))
    for part, rows in zip(experiments.cut, experiments.cut.row_numbers, strict=True):
        spied.once(part, rows)
    if len({len(watched.units) for watched in seen}) != 1 or not seen[0].units:
        return [SeenMean(values=tuple(float(len(rows)) for rows in experiments.cut.row_numbers), is_weighted=False)]
    return [
        SeenMean(values=tuple(float(watched.units[call]) for watched in seen), is_weighted=seen[0].is_weighted[call])
        for call in range(len(seen[0].units))
    ]


class _Weighted(ObservedMeans):
    """Sees too whether a loss function was given class weights."""

    def __init__(self) -> None:
        super().__init__()
        self.is_weighted: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self.units)
        result = super().__torch_function__(func, types, args, kwargs)
        if len(self.units) > before:
            call = self.calls[-1]
            self.is_weighted.append(call is not None and call.is_weighted)
        return result
