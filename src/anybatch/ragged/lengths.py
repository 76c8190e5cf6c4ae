"""Lengths of the rows of a batch, and the dims that hold their padding."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anybatch.core import Batch, NamedPart, is_array, leaves, map_leaves, num_rows, per_row_lists, tensors
from anybatch.errors import SplitError

PaddedDims = Mapping[str, tuple[int, ...]]
"""By path, the dims of a tensor that are padded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLengths:
    """The rows of a padded batch: row k needs `lengths[k]` of its `width` columns, the last ones if `is_left`."""

    lengths: Sequence[int]
    width: int
    is_left: bool = False
    untrimmed: str | None = None
    """Why padding was left in, if it was."""
    dims: PaddedDims = field(default_factory=dict)
    """Fields with an entry per token."""

    def columns(self, length: int) -> slice:
        """Return the columns that rows of at most this length need."""
        return slice(self.width - length, self.width) if self.is_left else slice(0, length)


def sample_length(sample: Any) -> int:
    """Return the length of a raw sample: of its `input_ids`, or else of its first sequence or tensor.

    >>> sample_length({"name": "a", "input_ids": [5, 6, 7]}), sample_length(([1, 2], 0))
    (3, 2)
    """
    parts = [sample]
    if isinstance(sample, Mapping):
        parts = [sample["input_ids"]] if "input_ids" in sample else list(sample.values())
    elif isinstance(sample, (tuple, list)) and sample and _has_length(sample[0]):
        parts = list(sample)
    for part in parts:
        if _has_length(part):
            return len(part)
    raise SplitError(
        f"a sample of type {type(sample).__name__} has no sequence to take the length of. Give Tokens(collate=..., "
        "length=...), length being a function of a sample."
    )


def _has_length(part: Any) -> bool:
    if isinstance(part, (str, bytes, Mapping)):
        return False
    return part.dim() > 0 if isinstance(part, Tensor) else hasattr(part, "__len__")


def given_lengths(batch: Batch, length: Callable[[Any], Any], *, ignored: int, keep: Collection[str]) -> RowLengths:
    """Measure a batch that is padded on the right by the user's function."""
    count, given = num_rows(batch), length(batch)
    lengths = [int(number) for number in (given.tolist() if hasattr(given, "tolist") else given)]
    width = next((tensor.shape[1] for tensor in tensors(batch) if tensor.dim() > 1), 0)
    if len(lengths) != count or max(lengths, default=0) > width:
        raise SplitError(
            f"length(batch) gave {len(lengths)} lengths, the longest {max(lengths, default=0)}; expected {count}, one per row, "
            f"none above the padded width of {width}. The first tensor with two dimensions says what the width is."
        )
    needed = torch.tensor(lengths)
    for path, target in targets_of(batch, width, count, keep):
        beyond = _span(_is_counted(target, ignored))[1].cpu() > needed
        if beyond.any():
            row = int(beyond.nonzero()[0])
            raise SplitError(
                f"row {row} of batch{path} has targets beyond its length of {lengths[row]} that are not {ignored}: trimming "
                "would change the loss. Make length= count them, set them to the ignored index, give Tokens(ignored=...) if "
                "the criterion ignores another number, or name the tensor in Tokens(keep=...) if it is not padded."
            )
    return RowLengths(lengths=lengths, width=width)


def masked_lengths(batch: Mapping[str, Any], *, ignored: int, keep: Collection[str]) -> RowLengths:
    """Read lengths off `attention_mask`; a row also reaches as far as its last target that counts.

    Rows padded on the left are trimmed only if the batch has positions and nothing before the second token counts. Else the
    inputs of the model, or the loss of predicting the first token from padding, would depend on the width.
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
    starts, stops = _span(mask != 0)
    spans = [_span(_is_counted(target, ignored)) for _, target in targets_of(batch, width, count, keep)]
    first = torch.stack([torch.full_like(starts, width), *(start for start, _ in spans)]).amin(0)
    counted = torch.stack([stops, *(stop for _, stop in spans)]).amax(0)
    begins, ends, earliest, reach = torch.stack([starts.clamp(max=width - 1), stops, first, counted]).tolist()
    if min(ends) == width and max(begins) > 0:
        return _left_padded(begins, earliest, width, has_positions="position_ids" in batch)
    num_beyond = sum(far > end for far, end in zip(reach, ends, strict=True))
    note = (
        f"{num_beyond} of {count} rows have labels other than {ignored} beyond their attention mask, so that padding counts in "
        f"the loss and was left in there. Set the labels of padding to {ignored}, as collators of language models do."
    )
    return RowLengths(lengths=[max(far, 1) for far in reach], width=width, untrimmed=note if num_beyond else None)


def _left_padded(begins: list[int], earliest: list[int], width: int, *, has_positions: bool) -> RowLengths:
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


def targets_of(batch: Batch, width: int, count: int, keep: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) of possible targets: those named label or target, and all but the first of a tuple or list."""
    is_tuple = isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields")
    for path, value in columns_of(batch, count, keep):
        is_named = "label" in path or "target" in path
        is_wide = isinstance(value, Tensor) and value.shape[1] == width
        if is_wide and (is_named or (is_tuple and not path.startswith("[0]"))):
            yield path, value


def _is_counted(target: Tensor, ignored: int) -> Tensor:
    """Mark the places of rows x columns that count in a loss; all of a floating-point target do."""
    if target.is_floating_point():
        return torch.ones(target.shape[:2], dtype=torch.bool, device=target.device)
    counts = target != ignored
    return counts.flatten(2).any(2) if counts.dim() > 2 else counts


def _span(marked: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first marked column of each row, the width if there is none, and the one after the last, or 0."""
    width = marked.shape[1]
    columns = torch.arange(width, device=marked.device)
    return torch.where(marked, columns, width).amin(1), torch.where(marked, columns + 1, 0).amax(1)


def padded_dims(batch: Batch, *, width: int, count: int, keep: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Find every dim that is as wide as the padding, whether or not it has an entry per token.

    In a tensor of `count` rows this is dim 1; if its name says attention, any dim but 0, because attention masks may be
    square. Fields named in `keep` are left out.
    """
    found = {}
    for path, value in columns_of(batch, count, keep):
        dims = range(1, len(value.shape) if "attention" in name_of(path) else 2)
        found[path] = tuple(dim for dim in dims if value.shape[dim] == width)
    return {path: dims for path, dims in found.items() if dims}


def columns_of(batch: Batch, count: int, keep: Collection[str] = ()) -> Iterator[NamedPart]:
    """Yield (path, array) of every array with `count` rows and two or more dims, except those named in `keep`."""
    is_per_row_list = per_row_lists(count)

    def is_kept(path: str) -> bool:
        return path != "" and name_of(path) in keep

    for path, leaf in leaves(batch, lambda path, value: is_kept(path) or is_per_row_list(path, value)):
        if is_array(leaf) and not is_kept(path) and len(leaf.shape) > 1 and leaf.shape[0] == count:
            yield path, leaf


def name_of(path: str) -> str:
    """Return the last key, index or attribute of a path: `labels` for `['inputs']['labels']`."""
    return path.replace("[", ".").rsplit(".", 1)[-1].strip("]'\"")


def narrow(batch: Batch, columns: slice, dims: PaddedDims) -> Batch:
    """Keep only these `columns` of the padded dims, as views. Fields that `dims` does not name are left whole."""

    def narrowed(path: str, leaf: Any) -> Any:
        own = dims.get(path) if is_array(leaf) else None
        if own is None:
            return leaf
        return leaf[tuple(columns if dim in own else slice(None) for dim in range(max(own) + 1))]

    return map_leaves(batch, narrowed, lambda path, _: not any(other.startswith(path) for other in dims))
