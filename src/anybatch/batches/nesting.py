"""The containers a batch is nested in: what they hold, and the same container around other contents."""

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


def is_array(value: object) -> bool:
    """Tensors and NumPy arrays: what has a shape and whose dim 0, if it has one, is the rows."""
    return isinstance(value, Tensor) or (type(value).__module__ == "numpy" and hasattr(value, "shape"))


def is_sequence(value: object) -> bool:
    """Plain tuples and lists: the containers that may also be one object per row."""
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields") and not isinstance(value, torch.Size)


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


def map_tensors(value: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The same nesting with every tensor changed; everything else goes along as it is."""
    if isinstance(value, Tensor):
        return change(value)
    held = children(value)
    if held is None:
        return value
    return rebuild(value, [map_tensors(child, change) for _, child in held])


def tensors(value: Batch) -> Iterator[Tensor]:
    """Every tensor in the nesting, in order."""
    if isinstance(value, Tensor):
        yield value
        return
    for _, child in children(value) or ():
        yield from tensors(child)


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _rebuild_dataclass(value: Any, contents: list[Any]) -> Any:
    # not dataclasses.replace: it refuses fields with init=False and runs __post_init__ on cut data
    clone = copy.copy(value)
    assign = object.__setattr__ if value.__dataclass_params__.frozen else setattr
    for field, content in zip(dataclasses.fields(value), contents, strict=True):
        assign(clone, field.name, content)
    return clone
