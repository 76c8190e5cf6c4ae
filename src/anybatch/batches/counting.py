"""How many rows a batch has, and the batch of some of its rows.

Rows are dim 0 of every tensor and the length of every list of per-row objects. None, numbers, strings, 0-dim tensors
and other single objects go along whole.

A plain list or tuple may be a container of columns (`[inputs, targets]`) or hold one object per row. It is per row
when it holds no tensor and no container (`["a", "b"]`, `[3, 5]`), or when it stands beside a leaf that fixes the number
of rows and only its length agrees with it (ragged tensors: `{"labels": ..., "boxes": [5x4, 2x4, ...]}`).
"""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from anybatch.batches.nesting import Batch, children, is_array, is_sequence, map_tensors, rebuild
from anybatch.errors import BatchError

RowNumbers = slice | Tensor
"""Which rows to take: a slice (tensors become views) or a 1-D integer tensor (rows are copied)."""


def num_rows(batch: Batch) -> int:
    """The number of rows that every leaf of `batch` agrees on, at least 1.

    >>> num_rows({"x": torch.zeros(4, 3), "text": ["a", "b", "c", "d"], "scale": 0.5})
    4
    """
    count = _rows_of_columns(batch)
    return count if count > 0 else _count_leaves(batch)


def _rows_of_columns(batch: Batch) -> int:
    """The rows of a tensor, or of a plain tuple, list or dict of tensors, by far the most frequent batches; else 0."""
    columns = (batch,) if isinstance(batch, Tensor) else batch.values() if type(batch) is dict else batch
    if type(columns) not in (tuple, list) and type(batch) is not dict:
        return 0
    counts = {column.shape[0] if isinstance(column, Tensor) and column.dim() > 0 else 0 for column in columns}
    return counts.pop() if len(counts) == 1 else 0


def _count_leaves(batch: Batch) -> int:
    counts = list(_fixed_counts(batch)) or list(_column_counts(batch, ""))
    if not counts:
        raise BatchError(
            f"this batch has no rows: {_describe(batch)} holds no tensor of one or more dimensions. Give a nesting with "
            "at least one tensor whose dim 0 is the rows."
        )
    first_path, count = counts[0]
    for path, other in counts:
        if other != count:
            raise BatchError(
                f"the leaves of this batch disagree on the number of rows: {_spell(first_path)} has {count}, "
                f"{_spell(path)} has {other}. Every tensor's dim 0 and every list of per-row objects must have one "
                "entry per row; put a constant in as a number or a 0-dim tensor, and lists of ragged tensors beside "
                "a tensor with one entry per row."
            )
    if count == 0:
        raise BatchError(f"this batch is empty: {_spell(first_path)} has 0 rows. Give at least one row, or skip it.")
    if not _has_array(batch):
        raise BatchError(
            f"this batch holds no tensor: {_spell(first_path)} is a list of {count} per-row objects. Give at least one "
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
    return take(batch, chosen, num_rows(batch))


def take(batch: Batch, chosen: RowNumbers, count: int) -> Batch:
    """`take_rows` of a batch whose number of rows has been counted already."""
    if isinstance(batch, Tensor):
        if batch.dim() == 0:
            return batch
        return batch[chosen] if isinstance(chosen, slice) else batch.index_select(0, chosen.to(batch.device))
    if is_array(batch):
        if len(batch.shape) == 0:
            return batch
        return batch[chosen] if isinstance(chosen, slice) else batch[chosen.numpy(force=True)]
    if is_sequence(batch) and is_per_row(batch, count):
        taken = batch[chosen] if isinstance(chosen, slice) else [batch[number] for number in chosen.tolist()]
        return rebuild(batch, list(taken))
    held = children(batch)
    if held is None:
        return batch
    return rebuild(batch, [take(child, chosen, count) for _, child in held])


def split_rows(batch: Batch, sizes: list[int]) -> list[Batch]:
    """Consecutive rows, `sizes` of them at a time; tensors are cut into views. The sizes add up to the number of rows."""
    return _split(batch, list(accumulate(sizes)), sum(sizes))


def _split(batch: Batch, stops: list[int], count: int) -> list[Batch]:
    if isinstance(batch, Tensor):
        return list(batch.tensor_split(stops[:-1])) if batch.dim() > 0 else [batch] * len(stops)
    held = children(batch)
    if is_array(batch) or (held is not None and is_sequence(batch) and is_per_row(batch, count)):
        return [take(batch, slice(start, stop), count) for start, stop in pairwise([0, *stops])]
    if not held:
        return [batch] * len(stops)
    columns = [_split(child, stops, count) for _, child in held]
    return [rebuild(batch, list(parts)) for parts in zip(*columns, strict=True)]


def move(batch: Batch, device: torch.device) -> Batch:
    """The same nesting with every tensor on `device`; tensors that are there already are not copied."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _fixed_counts(batch: Batch) -> Iterator[tuple[str, int]]:
    """(path, rows) of the leaves that can be read in one way only: those not inside a nested list or tuple."""
    held = children(batch)
    if held is None or (is_sequence(batch) and _holds_objects(batch)):
        yield from _column_counts(batch, "")
        return
    for step, child in held:
        if is_sequence(child) and not _holds_objects(child):
            continue
        if is_sequence(child) or children(child) is None:
            yield from _column_counts(child, step)
        else:
            yield from ((step + path, count) for path, count in _fixed_counts(child))


def _column_counts(batch: Batch, path: str) -> Iterator[tuple[str, int]]:
    """(path, rows) of every leaf, nested lists and tuples read as containers of columns."""
    if is_array(batch):
        if len(batch.shape) > 0:
            yield path, batch.shape[0]
        return
    if is_sequence(batch) and _holds_objects(batch):
        yield path, len(batch)
        return
    for step, child in children(batch) or ():
        yield from _column_counts(child, path + step)


def _holds_objects(sequence: Any) -> bool:
    """True of a list of strings, numbers or other single objects: one per row, whatever else the batch holds."""
    has_object = False
    for item in sequence:
        if is_array(item) or children(item) is not None:
            return False
        has_object = has_object or item is not None
    return has_object


def is_per_row(sequence: Any, count: int) -> bool:
    """True of a list or tuple that holds one object per row, in a batch of `count` rows."""
    if _holds_objects(sequence):
        return True
    if len(sequence) != count:
        return False
    # [[1, 2], [3, 4]] beside two rows: with no tensor inside, one list per row is the likelier meaning
    return not _are_columns(sequence, count) or (
        not _has_array(sequence) and any(item is not None for item in sequence)
    )


def _are_columns(batch: Batch, count: int) -> bool:
    """True if every leaf inside has `count` rows in one of its readings."""
    if is_array(batch):
        return len(batch.shape) == 0 or batch.shape[0] == count
    if is_sequence(batch) and _holds_objects(batch):
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
                f"the leaves of this batch disagree on the number of rows: the batch has {count}, {_spell(where)} "
                f"has {child.shape[0]}, and {_spell(path)} is a list of {len(batch)}. A list must hold columns of "
                f"{count} rows or {count} per-row objects."
            )
        _check_sequences(child, count, where)


def _has_array(batch: Batch) -> bool:
    if is_array(batch):
        return len(batch.shape) > 0
    return any(_has_array(child) for _, child in children(batch) or ())


def _spell(path: str) -> str:
    return f"batch{path}"


def _describe(batch: Batch) -> str:
    return f"{type(batch).__name__} {batch!r}"[:80]
