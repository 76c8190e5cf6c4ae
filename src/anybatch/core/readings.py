"""The two readings of a list: columns of the batch, or one entry per row.

One rule, which looks at this batch alone and remembers no other:

1. In a list or tuple that is the batch, tensors are columns, as torch's default collation makes them, and so are dicts of
   matrices, such as encodings; strings, numbers and other records (dicts, `(image, label)`) are one per row and never cut.
2. Inside a batch, a list as long as the batch has rows is one entry per row, whatever it holds, and any other is columns.
3. A list that fits both readings is refused, and so are more than two like tensors, or tensors that disagree on their rows.
"""

from collections.abc import Mapping
from typing import Any

from anybatch.core.nesting import Batch, IsLeaf, children, is_array, is_sequence, leaves
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
    is_column = is_array(batch[0]) or _is_encoding(batch[0])
    if columns == 0 and not is_column:
        return True
    if columns > 0 and is_column and len(batch) <= 2:
        return False  # as default_collate makes them of one tensor or encoding per sample, and of pairs of them
    # tensors of different lengths are refused too: the next two that are equally long would be read as columns
    sizes = f"of {columns} rows each" if columns else f"that disagree on their rows ({_sizes_in_words(batch)})"
    raise BatchError(
        f"this list of {len(batch)} can be read in two ways: {len(batch)} samples, one per row; or {len(batch)} columns "
        f"{sizes}. For samples, give Rows(n, collate=...) or Tokens(n, collate=...), which collates those of each "
        "micro-batch, or have the loader say so by collate_fn=anybatch.SampleList. For columns, give a tuple or a dict "
        "instead of a list: collate_fn=lambda samples: tuple(default_collate(samples))."
    )


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


def is_per_row(sequence: Any, count: int) -> bool:
    """True of a list or tuple that holds one object per row, in a batch of `count` rows."""
    if is_marked(sequence) or holds_objects(sequence):
        return True
    if len(sequence) != count:
        return False
    # [[1, 2], [3, 4]] beside two rows: with no tensor inside, one list per row is the likelier meaning
    return not _are_columns(sequence, count) or (not has_array(sequence) and any(item is not None for item in sequence))


def per_row_lists(count: int) -> IsLeaf:
    """Tell the lists with one object per row from containers, in a batch of `count` rows that is marked if it is samples."""

    def is_leaf(path: str, value: Any) -> bool:
        # the batch itself may be as long as it has rows, and is columns all the same
        return is_sequence(value) and (is_per_row(value, count) if path else is_marked(value) or holds_objects(value))

    return is_leaf


def as_samples(sequence: Any) -> Any:
    """The list or tuple, marked as one sample per row: cut into shorter ones, it must not be read anew."""
    if is_marked(sequence) or not is_sequence(sequence) or holds_objects(sequence):
        return sequence
    if type(sequence) is list:
        return SampleList(sequence)
    return SampleTuple(sequence) if type(sequence) is tuple else sequence


def has_array(batch: Batch) -> bool:
    """True if there is a tensor or array of one or more dims anywhere inside."""
    return any(is_array(leaf) and len(leaf.shape) > 0 for _, leaf in leaves(batch))


def are_alike(sequence: Any) -> bool:
    """True of objects of one kind: the same type, keys, dtypes and numbers of dims, whatever their lengths."""
    return len({_kind(item) for item in sequence}) == 1


def _kind(value: Batch) -> object:
    """A value that is equal for samples of one dataset, whatever their lengths."""
    if is_array(value):
        return "array", str(value.dtype), len(value.shape)
    held = children(value)
    if held is None:
        return "object", type(value)
    if is_sequence(value):
        return type(value), frozenset(_kind(child) for _, child in held)
    return type(value), tuple((step, _kind(child)) for step, child in held)


def _is_of_kinds(value: Batch) -> bool:
    """True of a container whose members differ in kind, such as (image, label): a record, not a list of rows."""
    return len({_kind(child) for _, child in children(value) or ()}) > 1


def _is_encoding(value: Batch) -> bool:
    """True of a mapping of matrices: rows x tokens. A sample by itself has the tokens alone."""
    return isinstance(value, Mapping) and all(is_array(held) and len(held.shape) > 1 for held in value.values())


def _is_collated(batch: Batch) -> bool:
    """True if all leaves are arrays of one or more dims, or lists of strings: collation leaves no number as it is."""
    found = (leaf for _, leaf in leaves(batch, lambda _, value: _are_strings(value)))
    return all(leaf is None or _are_strings(leaf) or (is_array(leaf) and len(leaf.shape) > 0) for leaf in found)


def _are_strings(value: Batch) -> bool:
    return is_sequence(value) and len(value) > 0 and all(isinstance(item, str | bytes) for item in value)


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


def _leading_sizes(batch: Batch) -> list[int]:
    """The rows of each leaf of a collated batch."""
    found = (leaf for _, leaf in leaves(batch, lambda _, value: _are_strings(value)))
    return [len(leaf) for leaf in found if leaf is not None]


def _sizes_in_words(batch: Batch) -> str:
    sizes = list(dict.fromkeys(size for item in batch for size in _leading_sizes(item)))
    return ", ".join(map(str, sizes[:4])) + (", ..." if len(sizes) > 4 else "")


def _are_columns(batch: Batch, count: int) -> bool:
    """True if every leaf inside has `count` rows in one of its readings."""

    def is_leaf(path: str, value: Any) -> bool:
        return is_sequence(value) and (holds_objects(value) or (path != "" and len(value) == count))

    def fits(leaf: Any) -> bool:
        if is_array(leaf):
            return len(leaf.shape) == 0 or bool(leaf.shape[0] == count)
        return not is_sequence(leaf) or len(leaf) in (0, count)

    return all(fits(leaf) for _, leaf in leaves(batch, is_leaf))


def check_one_reading(batch: Batch, count: int) -> None:
    """Refuse lists inside a batch that may be one object per row, though they were read as columns of `count` rows."""
    if is_marked(batch):
        return
    alone = lists_alone(batch)
    lengths = {length for _, length in alone}
    # two tensors in each list are pairs of columns; dicts are not, however few
    if len(lengths) == 1 and lengths != {count} and (max(lengths) > 2 or _has_mappings(batch)):
        raise _two_readings("the lists of this batch", lengths.pop(), count)
    is_per_row_list = per_row_lists(count)

    def is_leaf(path: str, value: Any) -> bool:
        if is_marked(value) or is_per_row_list(path, value):
            return True
        if path and is_sequence(value) and len(value) == count > 1 and has_array(value) and _are_columns(value, count):
            raise _two_readings(f"batch{path}", count, count)
        return False

    for _ in leaves(batch, is_leaf):
        pass


def _has_mappings(batch: Batch) -> bool:
    """True if one of the lists in a batch of lists holds mappings, such as the targets of detection."""
    return any(isinstance(column[0], Mapping) for _, column in children(batch) or ())


def _two_readings(what: str, length: int, count: int) -> BatchError:
    return BatchError(
        f"{what} can be read in two ways: {length} objects, one per row; or {length} columns of {count} rows each. For one "
        "object per row, mark it in the collate_fn, as anybatch.SampleList(...); for columns, make it a dict."
    )


def lists_alone(batch: Batch) -> list[tuple[str, int]]:
    """(path, length) of the lists of a batch that holds two or more of them and nothing else, each of like objects."""
    held = children(batch) or []
    is_all = len(held) > 1 and all(is_sequence(child) and child and are_alike(child) for _, child in held)
    return [(step, len(child)) for step, child in held] if is_all else []
