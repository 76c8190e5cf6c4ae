"""How many rows a batch has, and the batch of some of its rows.

Rows are dim 0 of every tensor and the length of every list of per-row objects. None, numbers, strings, 0-dim tensors
and other single objects go along whole.

A plain list or tuple may be a container of columns (`[inputs, targets]`) or hold one object per row; `readings` says which a
list is that makes a batch by itself. Inside a batch it is per row when it holds no tensor and no container (`["a", "b"]`,
`[3, 5]`), or when its length agrees with the rows and what it holds does not (ragged tensors: `{"labels": ..., "boxes": [5x4,
2x4, ...]}`); where both agree, a batch is not cut.
"""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from anybatch.batches.nesting import Batch, children, is_array, is_sequence, rebuild
from anybatch.batches.readings import are_alike, as_samples, has_array, holds_objects, holds_samples, is_marked
from anybatch.errors import BatchError

RowNumbers = slice | Tensor
"""Which rows to take: a slice (tensors become views) or a 1-D integer tensor (rows are copied)."""


def num_rows(batch: Batch) -> int:
    """The number of rows that every leaf of `batch` agrees on, at least 1.

    >>> num_rows({"x": torch.zeros(4, 3), "text": ["a", "b", "c", "d"], "scale": 0.5})
    4
    """
    count = _rows_of_columns(batch)
    if count > 0:
        return count
    return len(batch) if holds_samples(batch) else _count_leaves(batch)


def rows_to_cut(batch: Batch) -> int:
    """The number of rows of a whole batch; an error where a list inside it can be read in two ways.

    Micro-batches are not asked: lists that were cut by rows are marked, and all others were columns.
    """
    count = _rows_of_columns(batch)
    if count > 0:
        return count
    count = num_rows(batch)
    _check_one_reading(read(batch), count)
    return count


def _rows_of_columns(batch: Batch) -> int:
    """The rows of a tensor, or of a plain tuple, list or dict of tensors, by far the most frequent batches; else 0."""
    columns = (batch,) if isinstance(batch, Tensor) else batch.values() if type(batch) is dict else batch
    if type(columns) is not tuple and type(batch) is not dict and (type(columns) is not list or len(columns) > 2):
        return 0  # a longer list may hold samples
    counts = {column.shape[0] if isinstance(column, Tensor) and column.dim() > 0 else 0 for column in columns}
    return counts.pop() if len(counts) == 1 else 0


def _count_leaves(batch: Batch) -> int:
    counts = list(_fixed_counts(batch)) or list(_zipped_counts(batch)) or list(_column_counts(batch, ""))
    if not counts:
        raise BatchError(
            f"this batch has no rows: {_describe(batch)} holds no tensor of one or more dimensions. Give a nesting with "
            "at least one tensor whose dim 0 is the rows."
        )
    first_path, count = counts[0]
    for path, other in counts:
        if other != count:
            raise BatchError(
                f"the leaves of this batch disagree on the number of rows: batch{first_path} has {count}, "
                f"batch{path} has {other}. Every tensor's dim 0 and every list of per-row objects must have one "
                "entry per row; put a constant in as a number or a 0-dim tensor, and lists of ragged tensors beside "
                "a tensor with one entry per row."
            )
    if count == 0:
        raise BatchError(f"this batch is empty: batch{first_path} has 0 rows. Give at least one row, or skip it.")
    if not has_array(batch):
        raise BatchError(
            f"this batch holds no tensor: batch{first_path} is a list of {count} per-row objects. Give at least one "
            "tensor whose dim 0 is the rows; tokenise or collate before the batch is cut."
        )
    _check_sequences(batch, count)
    return count


def rows(batch: Batch) -> int:
    """Units of a loss that averages over rows: the number of rows.

    >>> rows((torch.zeros(5, 2), torch.zeros(5)))
    5
    """
    return num_rows(batch)


def take_rows(batch: Batch, row_numbers: RowNumbers | list[int]) -> Batch:
    """The same nesting with only these rows, in this order.

    >>> take_rows({"x": torch.arange(4), "name": ["a", "b", "c", "d"]}, [2, 0])
    {'x': tensor([2, 0]), 'name': ['c', 'a']}
    """
    chosen = torch.tensor(row_numbers, dtype=torch.long) if isinstance(row_numbers, list) else row_numbers
    return take(read(batch), chosen, num_rows(batch))


def read(batch: Batch) -> Batch:
    """The batch, marked where it is a list of samples."""
    return as_samples(batch) if _rows_of_columns(batch) == 0 and holds_samples(batch) else batch


def take(batch: Batch, chosen: RowNumbers, count: int) -> Batch:
    """`take_rows` of a batch whose rows have been counted already, and which is marked if it is a list of samples."""
    if is_columns(batch):
        return rebuild(batch, [_take(child, chosen, count) for _, child in children(batch) or ()])
    return _take(batch, chosen, count)


def is_columns(batch: Batch) -> bool:
    """True of a whole batch that is a list or tuple of columns: not marked, though it may be as long as it has rows."""
    return is_sequence(batch) and not is_marked(batch) and not holds_objects(batch)


def _take(batch: Batch, chosen: RowNumbers, count: int) -> Batch:
    if isinstance(batch, Tensor):
        if batch.dim() == 0:
            return batch
        return (
            batch[chosen]
            if isinstance(chosen, slice)
            else batch.index_select(0, chosen.to(batch.device, non_blocking=True))
        )
    if is_array(batch):
        if len(batch.shape) == 0:
            return batch
        return batch[chosen] if isinstance(chosen, slice) else batch[chosen.numpy(force=True)]
    if is_sequence(batch) and is_per_row(batch, count):
        taken = batch[chosen] if isinstance(chosen, slice) else [batch[number] for number in chosen.tolist()]
        return rebuild(as_samples(batch), list(taken))
    held = children(batch)
    if held is None:
        return batch
    return rebuild(batch, [_take(child, chosen, count) for _, child in held])


def split_rows(batch: Batch, sizes: list[int]) -> list[Batch]:
    """Consecutive rows, `sizes` of them at a time; tensors are cut into views. The sizes add up to the number of rows."""
    stops, count = list(accumulate(sizes)), sum(sizes)
    if _rows_of_columns(batch) == 0:
        batch = read(batch)
        return _columns_split(batch, stops, count) if is_columns(batch) else _split(batch, stops, count)
    return _split(batch, stops, count) if isinstance(batch, Tensor) else _columns_split(batch, stops, count)


def _split(batch: Batch, stops: list[int], count: int) -> list[Batch]:
    if isinstance(batch, Tensor):
        return list(batch.tensor_split(stops[:-1])) if batch.dim() > 0 else [batch] * len(stops)
    held = children(batch)
    if is_array(batch) or (held is not None and is_sequence(batch) and is_per_row(batch, count)):
        return [_take(batch, slice(start, stop), count) for start, stop in pairwise([0, *stops])]
    return _columns_split(batch, stops, count)


def _columns_split(batch: Batch, stops: list[int], count: int) -> list[Batch]:
    held = children(batch)
    if not held:
        return [batch] * len(stops)
    columns = [_split(child, stops, count) for _, child in held]
    return [rebuild(batch, list(parts)) for parts in zip(*columns, strict=True)]


def _fixed_counts(batch: Batch) -> Iterator[tuple[str, int]]:
    """(path, rows) of the leaves that can be read in one way only: those not inside a nested list or tuple."""
    held = children(batch)
    if held is None or (is_sequence(batch) and holds_objects(batch)):
        yield from _column_counts(batch, "")
        return
    for step, child in held:
        if is_marked(child):
            yield step, len(child)
            continue
        if is_sequence(child) and not holds_objects(child):
            continue
        if is_sequence(child) or children(child) is None:
            yield from _column_counts(child, step)
        else:
            yield from ((step + path, count) for path, count in _fixed_counts(child))


def _zipped_counts(batch: Batch) -> Iterator[tuple[str, int]]:
    """(path, length) of lists with an object per row each, `tuple(zip(*samples))`: as columns, what they hold disagrees."""
    as_columns = {rows for _, rows in _column_counts(batch, "")}
    if len(as_columns) > 1:
        yield from _lists_alone(batch)


def _lists_alone(batch: Batch) -> list[tuple[str, int]]:
    """(path, length) of the lists of a batch that holds two or more of them and nothing else, each of like objects."""
    held = children(batch) or []
    is_all = len(held) > 1 and all(is_sequence(child) and child and are_alike(child) for _, child in held)
    return [(step, len(child)) for step, child in held] if is_all else []


def _column_counts(batch: Batch, path: str) -> Iterator[tuple[str, int]]:
    """(path, rows) of every leaf, nested lists and tuples read as containers of columns."""
    if is_array(batch):
        if len(batch.shape) > 0:
            yield path, batch.shape[0]
        return
    if is_sequence(batch) and holds_objects(batch):
        yield path, len(batch)
        return
    for step, child in children(batch) or ():
        yield from _column_counts(child, path + step)


def is_per_row(sequence: Any, count: int) -> bool:
    """True of a list or tuple that holds one object per row, in a batch of `count` rows."""
    if is_marked(sequence) or holds_objects(sequence):
        return True
    if len(sequence) != count:
        return False
    # [[1, 2], [3, 4]] beside two rows: with no tensor inside, one list per row is the likelier meaning
    return not _are_columns(sequence, count) or (not has_array(sequence) and any(item is not None for item in sequence))


def _are_columns(batch: Batch, count: int) -> bool:
    """True if every leaf inside has `count` rows in one of its readings."""
    if is_array(batch):
        return len(batch.shape) == 0 or batch.shape[0] == count
    if is_sequence(batch) and holds_objects(batch):
        return len(batch) == count
    return all(
        _are_columns(child, count) or (is_sequence(child) and len(child) == count) for _, child in children(batch) or ()
    )


def _check_sequences(batch: Batch, count: int, path: str = "") -> None:
    """Nested lists that were passed over in counting must agree in one of their two readings."""
    for step, child in children(batch) or ():
        where = path + step
        if is_sequence(child) and is_per_row(child, count):
            continue
        if is_array(child) and len(child.shape) > 0 and child.shape[0] != count:
            raise BatchError(
                f"the leaves of this batch disagree on the number of rows: the batch has {count}, batch{where} "
                f"has {child.shape[0]}, and batch{path} is a list of {len(batch)}. A list must hold columns of "
                f"{count} rows or {count} per-row objects."
            )
        _check_sequences(child, count, where)


def _check_one_reading(batch: Batch, count: int, path: str = "") -> None:
    """Refuse lists inside a batch that may be one object per row, though they were read as columns of `count` rows."""
    if is_marked(batch):
        return
    alone = {length for _, length in _lists_alone(batch)}
    if not path and len(alone) == 1 and alone != {count} and max(alone) > 2:
        raise _two_readings("the lists of this batch", alone.pop(), count)
    for step, child in children(batch) or ():
        where = path + step
        if is_sequence(child) and is_per_row(child, count):
            continue
        if is_sequence(child) and len(child) == count > 1 and has_array(child) and _are_columns(child, count):
            raise _two_readings(f"batch{where}", count, count)
        _check_one_reading(child, count, where)


def _two_readings(what: str, length: int, count: int) -> BatchError:
    return BatchError(
        f"{what} can be read in two ways: {length} objects, one per row; or {length} columns of {count} rows each. For one "
        "object per row, mark it in the collate_fn, as anybatch.SampleList(...); for columns, make it a dict."
    )


def _describe(batch: Batch) -> str:
    return f"{type(batch).__name__} {batch!r}"[:80]
