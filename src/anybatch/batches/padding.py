"""Cutting off padding that no row of a micro-batch needs."""

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor

from anybatch.batches.counting import is_per_row
from anybatch.batches.nesting import Batch, NamedPart, children, is_array, is_sequence, rebuild


def narrow(batch: Batch, columns: slice, *, width: int, count: int, keep: Collection[str] = ()) -> Batch:
    """The batch with only these `columns` of the padded dimension, on every tensor that carries it; views, not copies.

    A tensor of `count` rows carries it as dim 1, where that is `width` long; one whose name says attention may carry it in
    any dimension but 0, as square attention masks do. Those named in `keep` are left whole.
    """
    return _narrow(("", batch), columns, width, count, keep)


def padded_tensors(batch: Batch, *, width: int, count: int, keep: Collection[str] = ()) -> Iterator[NamedPart]:
    """(path, tensor) of everything that carries the padded dimension."""
    yield from _carriers("", ("", batch), width, count, keep)


def _narrow(step: NamedPart, columns: slice, width: int, count: int, keep: Collection[str]) -> Batch:
    name, value = step
    if is_array(value):
        dims = _padded_dims(name, value, width, count, keep)
        if not dims:
            return value
        return value[tuple(columns if dim in dims else slice(None) for dim in range(max(dims) + 1))]
    held = _columns_of(step, count, keep)
    return rebuild(value, [_narrow(child, columns, width, count, keep) for child in held]) if held else value


def _carriers(path: str, step: NamedPart, width: int, count: int, keep: Collection[str]) -> Iterator[NamedPart]:
    name, value = step
    if is_array(value):
        if _padded_dims(name, value, width, count, keep):
            yield path, value
        return
    for child in _columns_of(step, count, keep):
        yield from _carriers(path + child[0], child, width, count, keep)


def _padded_dims(name: str, value: Any, width: int, count: int, keep: Collection[str]) -> list[int]:
    shape = tuple(value.shape)
    if len(shape) < 2 or shape[0] != count or _bare(name) in keep:
        return []
    if "attention" in name:
        return [dim for dim in range(1, len(shape)) if shape[dim] == width]
    return [1] if shape[1] == width else []


def _columns_of(step: NamedPart, count: int, keep: Collection[str]) -> list[NamedPart]:
    """The children that are columns of the batch; none for a list of per-row objects."""
    name, value = step
    if isinstance(value, Tensor) or _bare(name) in keep or (is_sequence(value) and is_per_row(value, count)):
        return []
    return children(value) or []


def _bare(step: str) -> str:
    """The key, index or attribute of a step as the user would name it: `labels` for `['labels']`."""
    return step.strip("[].'\"")
