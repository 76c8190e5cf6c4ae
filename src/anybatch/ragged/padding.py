"""Which tensors of a padded batch have an entry per token, and cutting off padding that no row of a micro-batch needs."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from anybatch.core import Batch, NamedPart, is_array, leaves, map_leaves, per_row_lists

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

    def narrowed(path: str, leaf: Any) -> Any:
        own = dims.get(path) if is_array(leaf) else None
        return (
            leaf if own is None else leaf[tuple(columns if dim in own else slice(None) for dim in range(max(own) + 1))]
        )

    return map_leaves(batch, narrowed, lambda path, _: not any(other.startswith(path) for other in dims))


def padded_dims(batch: Batch, *, width: int, count: int, keep: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """The dims of everything that is as wide as the padding, whether or not it has an entry per token.

    A tensor of `count` rows carries it as dim 1, where that is `width` long; one whose name says attention may carry it in
    any dim but 0, as square attention masks do. Those named in `keep` are left out.
    """
    wide = {path: _wide_dims(name_of(path), value, width) for path, value in columns_of(batch, count, keep)}
    return {path: dims for path, dims in wide.items() if dims}


def columns_of(batch: Batch, count: int, keep: Collection[str] = ()) -> Iterator[NamedPart]:
    """(path, array) of everything with `count` rows and two or more dims, but for what is named in `keep`."""
    is_per_row_list = per_row_lists(count)

    def is_kept(path: str) -> bool:
        return path != "" and name_of(path) in keep

    for path, leaf in leaves(batch, lambda path, value: is_kept(path) or is_per_row_list(path, value)):
        if is_array(leaf) and not is_kept(path) and len(leaf.shape) > 1 and leaf.shape[0] == count:
            yield path, leaf


def name_of(path: str) -> str:
    """The last key, index or attribute of a path as the user would name it: `labels` for `['inputs']['labels']`."""
    return path.replace("[", ".").rsplit(".", 1)[-1].strip("]'\"")


def _wide_dims(name: str, value: Any, width: int) -> tuple[int, ...]:
    if "attention" in name:
        return tuple(dim for dim in range(1, len(value.shape)) if value.shape[dim] == width)
    return (1,) if value.shape[1] == width else ()
