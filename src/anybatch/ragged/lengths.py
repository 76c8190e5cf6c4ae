"""How long the rows of a batch are, and where their padding lies."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anybatch.core import Batch, NamedPart, is_array, leaves, map_leaves, num_rows, per_row_lists, tensors
from anybatch.errors import SplitError

PaddedDims = Mapping[str, tuple[int, ...]]
"""By path, the dims of a tensor that are padded."""

TOKEN_NAMES = frozenset(["ids", "input_ids", "inputs_embeds", "token_ids", "tokens"])
TOKEN_NAMES |= {"token_type_ids", "position_ids", "special_tokens_mask"}
"""Tokenizers' names of fields with one entry per token."""


def narrow(batch: Batch, columns: slice, dims: PaddedDims) -> Batch:
    """Keep only these `columns` of the padded dims; views, not copies. What `dims` does not name is left whole."""

    def narrowed(path: str, leaf: Any) -> Any:
        own = dims.get(path) if is_array(leaf) else None
        if own is None:
            return leaf
        return leaf[tuple(columns if dim in own else slice(None) for dim in range(max(own) + 1))]

    return map_leaves(batch, narrowed, lambda path, _: not any(other.startswith(path) for other in dims))


def padded_dims(batch: Batch, *, width: int, count: int, keep: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Find the dims of everything that is as wide as the padding, whether or not it has an entry per token.

    A tensor of `count` rows carries it as dim 1, where that is `width` long; one whose name says attention may carry it in
    any dim but 0, as square attention masks do. Those named in `keep` are left out.
    """
    wide = {path: _wide_dims(name_of(path), value, width) for path, value in columns_of(batch, count, keep)}
    return {path: dims for path, dims in wide.items() if dims}


def columns_of(batch: Batch, count: int, keep: Collection[str] = ()) -> Iterator[NamedPart]:
    """Yield (path, array) of everything with `count` rows and two or more dims, but for what is named in `keep`."""
    is_per_row_list = per_row_lists(count)

    def is_kept(path: str) -> bool:
        return path != "" and name_of(path) in keep

    for path, leaf in leaves(batch, lambda path, value: is_kept(path) or is_per_row_list(path, value)):
        if is_array(leaf) and not is_kept(path) and len(leaf.shape) > 1 and leaf.shape[0] == count:
            yield path, leaf


def name_of(path: str) -> str:
    """Return the last key, index or attribute of a path: `labels` for `['inputs']['labels']`."""
    return path.replace("[", ".").rsplit(".", 1)[-1].strip("]'\"")


def _wide_dims(name: str, value: Any, width: int) -> tuple[int, ...]:
    if "attention" in name:
        return tuple(dim for dim in range(1, len(value.shape)) if value.shape[dim] == width)
    return (1,) if value.shape[1] == width else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLengths:
    """The rows of a padded batch: row k needs `lengths[k]` of its `width` columns, at the end if `is_left`."""

    lengths: Sequence[int]
    width: int
    is_left: bool = False
    untrimmed: str | None = None
    """Why padding was left in, if it was."""
    dims: PaddedDims = field(default_factory=dict)
    """Fields with an entry per token, and in which dims."""

    def columns(self, length: int) -> slice:
        """Return the columns that rows of at most this length need."""
        return slice(self.width - length, self.width) if self.is_left else slice(0, length)


def given_lengths(
    batch: Batch, length: Callable[[Any], Any], *, ignored: int, keep: Collection[str] = ()
) -> RowLengths:
    """Call the user's function of a batch that is padded on the right."""
    count, given = num_rows(batch), length(batch)
    lengths = [int(number) for number in (given.tolist() if hasattr(given, "tolist") else given)]
    width = next((tensor.shape[1] for tensor in tensors(batch) if tensor.dim() > 1), 0)
    if len(lengths) != count or max(lengths, default=0) > width:
        raise SplitError(
            f"length(batch) gave {len(lengths)} lengths, the longest {max(lengths, default=0)}; expected {count}, one per row, "
            f"none above the padded width of {width}. The first tensor with two dimensions says what the width is."
        )
    needed = torch.tensor(lengths)
    for path, target in _targets(batch, width, count, keep):
        beyond = _last_counted(target, ignored).cpu() > needed
        if beyond.any():
            row = int(beyond.nonzero()[0])
            raise SplitError(
                f"row {row} of batch{path} has targets beyond its length of {lengths[row]} that are not {ignored}: trimming "
                "would change the loss. Make length= count them, set them to the ignored index, give Tokens(ignored=...) if "
                "the criterion ignores another number, or name the tensor in Tokens(keep=...) if it is not padded."
            )
    return RowLengths(lengths=lengths, width=width)


def masked_lengths(batch: Mapping[str, Any], *, ignored: int, keep: Collection[str] = ()) -> RowLengths:
    """Lengths read off `attention_mask`; a row also reaches as far as its targets that count.

    Rows padded on the left are trimmed only if positions are given with them and nothing before the second token counts: else
    what the model sees, or the loss of predicting the first token from padding, would depend on the width.
    """
    mask = batch["attention_mask"]
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        kind = f"tensor of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise SplitError(
            f"attention_mask is a {kind}; expected a tensor of rows x tokens to read lengths from. Give "
            "Tokens(length=...), a function of the batch that returns one length per row."
        )
    count, width = mask.shape
    if "start_positions" in batch:
        why = "the loss of question answering is a softmax over all positions, padding included, and was not trimmed."
        return RowLengths(lengths=[width] * count, width=width, untrimmed=why)
    positions = torch.arange(width, device=mask.device)
    is_real = mask != 0
    stops = torch.where(is_real, positions + 1, 0).amax(1)
    starts = torch.where(is_real, positions, width).amin(1).clamp(max=width - 1)
    targets = [target for _, target in _targets(batch, width, count, keep)]
    counted = torch.stack([stops, *(_last_counted(target, ignored) for target in targets)]).amax(0)
    firsts = [_first_counted(target, ignored) for target in targets]
    first = torch.stack([torch.full_like(starts, width), *firsts]).amin(0)
    ends, begins, reach, earliest = torch.stack([stops, starts, counted, first]).tolist()
    if min(ends) == width and max(begins) > 0:
        return _left(begins, earliest, width, has_positions="position_ids" in batch)
    num_beyond = sum(far > end for far, end in zip(reach, ends, strict=True))
    note = None
    if num_beyond:
        note = (
            f"{num_beyond} of {count} rows have labels other than {ignored} beyond their attention mask, so that padding "
            f"counts in the loss and was left in there. Set the labels of padding to {ignored}, as collators of language "
            "models do."
        )
    return RowLengths(lengths=[max(far, 1) for far in reach], width=width, untrimmed=note)


def sample_length(sample: Any) -> int:
    """Return the length of a raw sample: of its `input_ids`, or else of its first sequence or tensor.

    >>> sample_length({"name": "a", "input_ids": [5, 6, 7]}), sample_length(([1, 2], 0))
    (3, 2)
    """
    if isinstance(sample, Mapping):
        parts = [sample["input_ids"]] if "input_ids" in sample else list(sample.values())
    elif isinstance(sample, (tuple, list)) and sample and _is_long(sample[0]):
        parts = list(sample)
    else:
        parts = [sample]
    for part in parts:
        if _is_long(part):
            return len(part)
    raise SplitError(
        f"a sample of type {type(sample).__name__} has no sequence to take the length of. Give Tokens(collate=..., "
        "length=...), length being a function of a sample."
    )


def _is_long(part: Any) -> bool:
    if isinstance(part, (str, bytes, Mapping)):
        return False
    return part.dim() > 0 if isinstance(part, Tensor) else hasattr(part, "__len__")


def _left(begins: list[int], earliest: list[int], width: int, *, has_positions: bool) -> RowLengths:
    is_counted = any(begin > 0 and first <= begin for begin, first in zip(begins, earliest, strict=True))
    if has_positions and not is_counted:
        return RowLengths(lengths=[width - begin for begin in begins], width=width, is_left=True)
    why = (
        "the first token of a padded row counts as a target, predicted from padding. Set its label to be ignored"
        if has_positions
        else "without position_ids, trimming would move every token. Put position_ids into the batch, or pad on the right"
    )
    why = f"rows are padded on the left and were not trimmed: {why}."
    return RowLengths(lengths=[width] * len(begins), width=width, untrimmed=why)


def paths_per_token(batch: Batch, *, width: int, keep: Collection[str], is_masked: bool) -> set[str]:
    """Find the paths of targets, and without a mask that of the first tensor of two dims, whose width is the padding's."""
    count = num_rows(batch)
    wide = [path for path, value in columns_of(batch, count, keep) if value.shape[1] == width]
    return {path for path, _ in _targets(batch, width, count, keep)} | set([] if is_masked else wide[:1])


def _targets(batch: Batch, width: int, count: int, keep: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield what a loss may count: tensors named label or target, and all but the first of a tuple or list."""
    is_tuple = isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields")
    for path, value in columns_of(batch, count, keep):
        is_named = "label" in path or "target" in path
        is_wide = isinstance(value, Tensor) and value.shape[1] == width
        if is_wide and (is_named or (is_tuple and not path.startswith("[0]"))):
            yield path, value


def _is_counted(target: Tensor, ignored: int) -> Tensor:
    """Tell which of rows x columns count; every number of a floating-point target does."""
    if target.is_floating_point():
        return torch.ones(target.shape[:2], dtype=torch.bool, device=target.device)
    counts = target != ignored
    return counts.flatten(2).any(2) if counts.dim() > 2 else counts


def _last_counted(target: Tensor, ignored: int) -> Tensor:
    """Count the columns of each row up to its last target that counts."""
    counts = _is_counted(target, ignored)
    return torch.where(counts, torch.arange(1, counts.shape[1] + 1, device=target.device), 0).amax(1)


def _first_counted(target: Tensor, ignored: int) -> Tensor:
    counts = _is_counted(target, ignored)
    width = counts.shape[1]
    return torch.where(counts, torch.arange(width, device=target.device), width).amin(1)
