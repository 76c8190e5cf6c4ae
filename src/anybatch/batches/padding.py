"""Which tensors of a padded batch have an entry per token, and cutting off padding that no row of a micro-batch needs."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from anybatch.batches.counting import is_per_row
from anybatch.batches.nesting import Batch, NamedPart, children, is_array, is_sequence, rebuild
from anybatch.batches.readings import is_marked

PaddedDims = Mapping[str, tuple[int, ...]]
"""By path, the dims of a tensor that are padded."""

TOKEN_NAMES = frozenset(
    [
        "ids",
        "input_ids",
        "inputs_embeds",
        "token_ids",
        "tokens",
        "token_type_ids",
        "position_ids",
        "special_tokens_mask",
    ]
)
"""What tokenizers call fields with one entry per token."""


def narrow(batch: Batch, columns: slice, dims: PaddedDims) -> Batch:
    """The batch with only these `columns` of the padded dims; views, not copies. What `dims` does not name is left whole."""
    return _narrow("", batch, columns, dims)


def padded_dims(batch: Batch, *, width: int, count: int, keep: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """The dims of everything that is as wide as the padding, whether or not it has an entry per token.

    A tensor of `count` rows carries it as dim 1, where that is `width` long; one whose name says attention may carry it in
    any dim but 0, as square attention masks do. Those named in `keep` are left out.
    """
    wide = {path: _wide_dims(name_of(path), value, width) for path, value in columns_of(batch, count, keep)}
    return {path: dims for path, dims in wide.items() if dims}


def columns_of(batch: Batch, count: int, keep: Collection[str] = ()) -> Iterator[NamedPart]:
    """(path, array) of everything with `count` rows and two or more dims, but for what is named in `keep`."""
    yield from _columns("", batch, count, keep)


def name_of(path: str) -> str:
    """The last key, index or attribute of a path as the user would name it: `labels` for `['inputs']['labels']`."""
    return path.replace("[", ".").rsplit(".", 1)[-1].strip("]'\"")


def _wide_dims(name: str, value: Any, width: int) -> tuple[int, ...]:
    if "attention" in name:
        return tuple(dim for dim in range(1, len(value.shape)) if value.shape[dim] == width)
    return (1,) if value.shape[1] == width else ()


def _columns(path: str, value: Batch, count: int, keep: Collection[str]) -> Iterator[NamedPart]:
    if path and name_of(path) in keep:
        return
    if is_array(value):
        if len(value.shape) > 1 and value.shape[0] == count:
            yield path, value
        return
    if (is_sequence(value) and is_per_row(value, count)) if path else is_marked(value):
        return
    for step, child in children(value) or ():
        yield from _columns(path + step, child, count, keep)


def _narrow(path: str, value: Batch, columns: slice, dims: PaddedDims) -> Batch:
    if is_array(value):
        own = dims.get(path)
        return (
            value
            if own is None
            else value[tuple(columns if dim in own else slice(None) for dim in range(max(own) + 1))]
        )
    held = None if isinstance(value, Tensor) else children(value)
    if not held or not any(other.startswith(path) for other in dims):
        return value
    return rebuild(value, [_narrow(path + step, child, columns, dims) for step, child in held])
