"""The two readings of a list: columns of the batch (`[inputs, targets]`), or one sample per row (`[first, second, ...]`).

What torch's default collation makes is columns: tensors that agree on their dim 0, in a list where samples were tuples. What a
loader with `collate_fn=list` hands over is samples: alike in kind, each of its own length. Some may be both: eight tensors of
12 tokens are eight samples, or eight columns of 12 rows. Nothing in them says which, so they are an error.
"""

from collections.abc import Mapping
from typing import Any

from anybatch.batches.nesting import Batch, children, is_array, is_sequence
from anybatch.errors import BatchError


class SampleList(list[Any]):
    """A list with one sample per row: as a `collate_fn` it says so, whatever the samples look like.

    >>> from anybatch import num_rows
    >>> import torch
    >>> num_rows(SampleList([torch.zeros(12), torch.zeros(12), torch.zeros(12)]))
    3
    """


class SampleTuple(tuple[Any, ...]):
    """A tuple with one sample per row."""


def as_samples(sequence: Any) -> Any:
    """The list or tuple, marked as one sample per row: cut into shorter ones, it must not be read anew."""
    if isinstance(sequence, SampleList | SampleTuple) or not is_sequence(sequence) or holds_objects(sequence):
        return sequence
    if type(sequence) is list:
        return SampleList(sequence)
    return SampleTuple(sequence) if type(sequence) is tuple else sequence


def is_marked(sequence: Batch) -> bool:
    """True of a list or tuple that says itself that it holds one sample per row."""
    return isinstance(sequence, SampleList | SampleTuple)


def holds_objects(sequence: Any) -> bool:
    """True of a list of strings, numbers or other single objects: one per row, whatever else the batch holds."""
    has_object = False
    for item in sequence:
        if is_array(item) or children(item) is not None:
            return False
        has_object = has_object or item is not None
    return has_object


def holds_samples(batch: Batch) -> bool:
    """True of a batch that is a list of samples, one per row; an error where it may as well be columns.

    A tuple is read as columns, unless it holds like records, such as (image, label), with numbers in them.
    """
    if is_marked(batch):
        return True
    if type(batch) not in (list, tuple) or len(batch) == 0 or not has_array(batch) or not are_alike(batch):
        return False
    is_record = _is_of_kinds(batch[0])
    if type(batch) is tuple:
        return is_record and not _is_collated(batch)
    if not _is_collated(batch) or (is_record and type(batch[0]) is tuple):
        return True
    columns = _rows_as_columns(batch)
    if columns == 0:
        return True
    if len(batch) <= 2 and (is_array(batch[0]) or _is_encoding(batch[0])):
        return False  # what loaders make of one tensor or encoding per sample, and of pairs of them
    raise BatchError(
        f"this list of {len(batch)} can be read in two ways: {len(batch)} samples, one per row; or {len(batch)} columns of "
        f"{columns} rows each. For samples, give Rows(n, collate=...) or Tokens(n, collate=...), which collates those of each "
        "micro-batch, or have the loader say so by collate_fn=anybatch.SampleList. For columns, give a tuple or a dict "
        "instead of a list: collate_fn=lambda samples: tuple(default_collate(samples))."
    )


def _is_encoding(value: Batch) -> bool:
    """True of a mapping of matrices: rows x tokens. A sample by itself has the tokens alone."""
    return isinstance(value, Mapping) and all(is_array(held) and len(held.shape) > 1 for held in value.values())


def _rows_as_columns(batch: Any) -> int:
    """The rows that a list of like, collated things has if they are columns; 0 if they cannot be."""
    sizes = [_leading_sizes(item) for item in batch]
    if len({size for own in sizes for size in own}) == 1:
        return sizes[0][0]
    is_zipped = (
        all(is_sequence(column) and len(column) > 1 and are_alike(column) for column in batch)
        and len({len(column) for column in batch}) == 1
        and (all(own == sizes[0] for own in sizes) or any(len(set(own)) > 1 for own in sizes))
    )
    return len(batch[0]) if is_zipped else 0


def has_array(batch: Batch) -> bool:
    """True if there is a tensor or array of one or more dims anywhere inside."""
    if is_array(batch):
        return len(batch.shape) > 0
    return any(has_array(child) for _, child in children(batch) or ())


def _kind(value: Batch) -> object:
    """What two samples of one dataset have in common, whatever their lengths."""
    if is_array(value):
        return "array", str(value.dtype), len(value.shape)
    held = children(value)
    if held is None:
        return "object", type(value)
    if is_sequence(value):
        return type(value), frozenset(_kind(child) for _, child in held)
    return type(value), tuple((step, _kind(child)) for step, child in held)


def are_alike(sequence: Any) -> bool:
    """True of objects of one kind: the same type, keys, dtypes and numbers of dims, whatever their lengths."""
    return len({_kind(item) for item in sequence}) == 1


def _is_of_kinds(value: Batch) -> bool:
    """True of a container whose members differ in kind, such as (image, label): a record, not a list of rows."""
    return len({_kind(child) for _, child in children(value) or ()}) > 1


def _is_collated(batch: Batch) -> bool:
    """True if all leaves are arrays of one or more dims, or lists of strings: collation leaves no number as it is."""
    if is_array(batch):
        return len(batch.shape) > 0
    if _are_strings(batch):
        return True
    held = children(batch)
    return batch is None or (bool(held) and all(_is_collated(child) for _, child in held or ()))


def _are_strings(value: Batch) -> bool:
    return is_sequence(value) and len(value) > 0 and all(isinstance(item, str | bytes) for item in value)


def _leading_sizes(batch: Batch) -> list[int]:
    if is_array(batch) or _are_strings(batch):
        return [len(batch)]  # every leaf has one, or the list is not collated
    return [size for _, child in children(batch) or () for size in _leading_sizes(child)]
