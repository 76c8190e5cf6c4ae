"""A nested batch: one walk over its leaves, and the same nesting around other ones."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Batch = Any
"""Any nesting of tensors, tuples, lists, dicts, NamedTuples, dataclasses and mappings such as BatchEncoding."""

NamedPart = tuple[str, Any]
"""How a child is reached, as Python would spell it (`['labels']`, `[0]`, `.mask`), and the child."""

IsLeaf = Callable[[str, Any], bool]
"""(path, value) -> True where a walk must not look into `value`, though it is a container."""


def leaves(batch: Batch, is_leaf: IsLeaf | None = None, path: str = "") -> Iterator[NamedPart]:
    """(path, leaf) of everything that holds nothing, in order; of a container too where `is_leaf(path, container)`.

    >>> [path for path, _ in leaves({"x": 1, "pair": (2, [3])})]
    ["['x']", "['pair'][0]", "['pair'][1][0]"]
    """
    held = None if is_leaf is not None and is_leaf(path, batch) else children(batch)
    if not held:
        yield path, batch
        return
    for step, child in held:
        yield from leaves(child, is_leaf, path + step)


def map_leaves(batch: Batch, change: Callable[[str, Any], Any], is_leaf: IsLeaf | None = None, path: str = "") -> Batch:
    """The same nesting around `change(path, leaf)` of each of its `leaves`."""
    held = None if is_leaf is not None and is_leaf(path, batch) else children(batch)
    if not held:
        return change(path, batch)
    return rebuild(batch, [map_leaves(child, change, is_leaf, path + step) for step, child in held])


def map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The same nesting with every tensor changed; everything else goes along as it is."""
    return map_leaves(batch, lambda _, leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def tensors(batch: Batch) -> Iterator[Tensor]:
    """Every tensor in the nesting, in order."""
    return (leaf for _, leaf in leaves(batch) if isinstance(leaf, Tensor))


def children(value: Batch) -> list[NamedPart] | None:
    """What a container holds, in order; None where `value` is no container."""
    if isinstance(value, Tensor):
        return None
    if is_sequence(value):
        return [(f"[{index}]", child) for index, child in enumerate(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", getattr(value, name)) for name in value._fields]
    if _is_dataclass(value):
        return [(f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", child) for key, child in value.items()]
    return None


def rebuild(value: Batch, contents: list[Any]) -> Batch:
    """The container `value` around new `contents`, given in the order of `children`."""
    if type(value) in (list, tuple):
        return type(value)(contents)
    if isinstance(value, tuple):
        return type(value)(*contents) if hasattr(value, "_fields") else type(value)(contents)
    if isinstance(value, list):
        return type(value)(contents)
    if _is_dataclass(value):
        return _rebuild_dataclass(value, contents)
    if type(value) is dict:
        return dict(zip(value, contents, strict=True))
    # copy and update keeps what a mapping type carries beside its items, as torch's own collate does
    clone = copy.copy(value)
    clone.update(zip(value, contents, strict=True))
    return clone


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _rebuild_dataclass(value: Any, contents: list[Any]) -> Any:
    # not dataclasses.replace: it refuses fields with init=False and runs __post_init__ on cut data
    clone = copy.copy(value)
    assign = object.__setattr__ if value.__dataclass_params__.frozen else setattr
    for field, content in zip(dataclasses.fields(value), contents, strict=True):
        assign(clone, field.name, content)
    return clone


def is_array(value: object) -> bool:
    """True of tensors and NumPy arrays; dim 0, if there is one, is the rows."""
    return isinstance(value, Tensor) or (type(value).__module__ == "numpy" and hasattr(value, "shape"))


def is_sequence(value: object) -> bool:
    """True of plain tuples and lists, the containers that may also be one object per row."""
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields") and not isinstance(value, torch.Size)
