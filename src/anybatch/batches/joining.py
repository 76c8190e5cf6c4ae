"""Putting what several micro-batches gave back together: the inverse of cutting."""

from collections.abc import Sequence

import torch
from torch import Tensor

from anybatch.batches.nesting import Batch, children, is_sequence, rebuild
from anybatch.batches.readings import is_marked
from anybatch.batches.sending import sent
from anybatch.errors import BatchError


def join_rows(parts: Sequence[Batch]) -> Batch:
    """One nesting with the rows of all parts, in order; autograd sees through it.

    Tensors are concatenated along dim 0, lists of per-row objects one after the other. A 0-dim tensor or a single object
    belongs to no row: it must be the same in every part, and the last part's stands for all.

    >>> join_rows([{"x": torch.tensor([1, 2]), "id": ["a", "b"]}, {"x": torch.tensor([3]), "id": ["c"]}])
    {'x': tensor([1, 2, 3]), 'id': ['a', 'b', 'c']}
    """
    return _join(list(parts), "")


def reorder_rows(batch: Batch, order: Sequence[int]) -> Batch:
    """What `join_rows` gave, with its rows in this order; autograd sees through it.

    >>> reorder_rows({"x": torch.tensor([1, 2]), "id": ["a", "b"], "scale": 2.0}, [1, 0])
    {'x': tensor([2, 1]), 'id': ['b', 'a'], 'scale': 2.0}
    """
    if isinstance(batch, Tensor):
        return batch if batch.dim() == 0 else batch.index_select(0, sent(order, batch.device))
    held = children(batch)
    if held is None:
        return batch
    if is_sequence(batch) and (is_marked(batch) or _holds_objects(batch)):
        return rebuild(batch, [batch[row] for row in order])
    return rebuild(batch, [reorder_rows(child, order) for _, child in held])


def _join(parts: list[Batch], path: str) -> Batch:
    last = parts[-1]
    if isinstance(last, Tensor):
        return _join_tensors(parts, path)
    held = [children(part) for part in parts]
    steps = [None if items is None else [step for step, _ in items] for items in held]
    if held[-1] is None:
        return _single(parts, path)
    if is_sequence(last) and all(is_marked(part) or _holds_objects(part) for part in parts):
        return rebuild(last, [item for part in parts for item in part])
    for number, other in enumerate(steps):
        if other != steps[-1]:
            raise BatchError(
                f"the parts are not nested alike: batch{path} holds {other} in part {number} and {steps[-1]} in part "
                f"{len(parts) - 1}. Return the same nesting for every micro-batch; ragged rows can be padded to one length."
            )
    columns = [[child for _, child in items or ()] for items in held]
    names = [step for step, _ in held[-1]]
    return rebuild(last, [_join(list(column), path + name) for name, *column in zip(names, *columns, strict=True)])


def _join_tensors(parts: list[Batch], path: str) -> Tensor:
    last = parts[-1]
    shapes = [tuple(part.shape) if isinstance(part, Tensor) else part for part in parts]
    if last.dim() == 0:
        _single([part.detach() if isinstance(part, Tensor) else part for part in parts], path)
        return parts[-1]  # type: ignore[no-any-return]
    if any(not isinstance(shape, tuple) or shape[1:] != tuple(last.shape[1:]) or not shape for shape in shapes):
        raise BatchError(
            f"batch{path} has shapes {', '.join(map(str, shapes))} in the micro-batches, which differ beyond dim 0: they "
            "cannot be joined. Make every row alike, for example by padding to one length."
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _single(parts: list[Batch], path: str) -> Batch:
    last = parts[-1]
    for number, part in enumerate(parts):
        if isinstance(last, Tensor) and isinstance(part, Tensor):
            is_same = torch.equal(part, last)
        else:
            is_same = part is last or bool(part == last)
        if not is_same:
            raise BatchError(
                f"batch{path} belongs to no row, but is {part!r} in part {number} and {last!r} in the last. Give it one "
                "entry per row (dim 0), or the same value in every micro-batch."
            )
    return last


def _holds_objects(sequence: Batch) -> bool:
    """True of lists of strings, numbers and other single objects: one per row."""
    return all(not isinstance(item, Tensor) and children(item) is None for item in sequence) and len(sequence) > 0
