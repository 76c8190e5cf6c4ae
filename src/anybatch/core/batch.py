"""Batches: count, take, split and join their rows, and move them to a device.

Rows are dim 0 of every tensor and array. None, numbers, strings, 0-dim tensors and other single objects belong to no row, and
every micro-batch gets them. A list of strings, numbers or other single objects has one per row, and so has a `SampleList`.
Any other list inside a batch has one object per row if it is as long as the batch and cannot be columns of that many rows;
else it holds columns. A batch that is itself a list of similar samples with arrays has one sample per row. `BatchError` is
raised if a list can be read both ways.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.errors import BatchError

Batch = Any
"""Any nesting of tensors, tuples, lists, dicts, NamedTuples, dataclasses and mappings such as BatchEncoding."""

NamedPart = tuple[str, Any]
"""Path to a child, in Python syntax (`['labels']`, `[0]`, `.mask`), and the child."""

IsLeaf = Callable[[str, Any], bool]
"""(path, container) -> True if a walk must not descend into it."""

RowNumbers = slice | Tensor
"""Rows to take: a slice (tensors become views) or a 1-D integer tensor (rows are copied)."""


# Walking


def leaves(batch: Batch, is_leaf: IsLeaf | None = None, path: str = "") -> Iterator[NamedPart]:
    """Yield (path, leaf) of every object that is no container, in order, and of containers with `is_leaf(path, container)`.

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
    """Return the same nesting with `change(path, leaf)` in place of each of its `leaves`."""
    held = None if is_leaf is not None and is_leaf(path, batch) else children(batch)
    if not held:
        return change(path, batch)
    return rebuild(batch, [map_leaves(child, change, is_leaf, path + step) for step, child in held])


def map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Return the same nesting with `change(tensor)` in place of every tensor."""
    return map_leaves(batch, lambda _, leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def tensors(batch: Batch) -> Iterator[Tensor]:
    """Yield every tensor in the nesting, in order."""
    return (leaf for _, leaf in leaves(batch) if isinstance(leaf, Tensor))


def children(value: Batch) -> list[NamedPart] | None:
    """List the children of a container, in order; None if `value` is no container."""
    if isinstance(value, Tensor):
        return None
    if is_sequence(value):
        return [(f"[{index}]", child) for index, child in enumerate(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", getattr(value, name)) for name in value._fields]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", child) for key, child in value.items()]
    return None


def rebuild(value: Batch, contents: list[Any]) -> Batch:
    """Put new `contents`, in the order of `children`, into a container like `value`."""
    if isinstance(value, (list, tuple)):
        return type(value)(*contents) if hasattr(value, "_fields") else type(value)(contents)
    if type(value) is dict:
        return dict(zip(value, contents, strict=True))
    clone = copy.copy(value)
    if dataclasses.is_dataclass(value):
        # dataclasses.replace would refuse fields with init=False, and run __post_init__
        assign = object.__setattr__ if value.__dataclass_params__.frozen else setattr  # type: ignore[union-attr]
        for field, content in zip(dataclasses.fields(value), contents, strict=True):
            assign(clone, field.name, content)
    else:
        # keeps the other attributes of a mapping type, as torch's collate does
        clone.update(zip(value, contents, strict=True))
    return clone


def is_array(value: object) -> bool:
    """Return True for tensors and NumPy arrays."""
    return isinstance(value, Tensor) or (type(value).__module__ == "numpy" and hasattr(value, "shape"))


def is_sequence(value: object) -> bool:
    """Return True for tuples and lists other than NamedTuples and sizes: they may hold one object per row."""
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields") and not isinstance(value, torch.Size)


# Counting rows


def num_rows(batch: Batch) -> int:
    """Count the rows of a batch.

    Args:
        batch: Any nesting of tensors that share their first dimension.

    Returns:
        The number of rows that every leaf agrees on, at least 1.

    Raises:
        BatchError: If leaves disagree, or there are no rows.

    Example:
        >>> num_rows({"x": torch.zeros(4, 3), "text": ["a", "b", "c", "d"], "scale": 0.5})
        4
    """
    count = _rows_of_columns(batch)
    if count > 0:
        return count
    return len(batch) if holds_samples(batch) else _count_leaves(batch)


def rows(batch: Batch) -> int:
    """Count the units of a loss that averages over rows: `Objective(loss, units=rows)`.

    Args:
        batch: Any nesting of tensors that share their first dimension.

    Returns:
        The number of rows.

    Example:
        >>> rows((torch.zeros(5, 2), torch.zeros(5)))
        5
    """
    return num_rows(batch)


def rows_to_cut(batch: Batch) -> int:
    """Count the rows of a whole batch, and refuse lists inside it that can be read in two ways.

    Not for micro-batches: in them, lists of rows are marked, and all others are columns.
    """
    count = _rows_of_columns(batch)
    if count > 0:
        return count
    count = num_rows(batch)
    batch = read(batch)
    if is_marked(batch):
        return count
    lengths = {length for _, length in _lists_alone(batch)}
    has_mappings = any(isinstance(column[0], Mapping) for _, column in children(batch) or ()) if lengths else False
    # two tensors per list are a pair of columns; two dicts, such as targets of detection, are not
    if len(lengths) == 1 and lengths != {count} and (max(lengths) > 2 or has_mappings):
        raise _two_readings("the lists of this batch", lengths.pop(), count)
    is_per_row = per_row_lists(count)

    def is_leaf(path: str, value: Any) -> bool:
        if is_marked(value) or is_per_row(path, value):
            return True
        if path and is_sequence(value) and len(value) == count > 1 and has_array(value) and _are_columns(value, count):
            raise _two_readings(f"batch{path}", count, count)
        return False

    for _ in leaves(batch, is_leaf):
        pass
    return count


def _two_readings(what: str, length: int, count: int) -> BatchError:
    return BatchError(
        f"{what} can be read in two ways: {length} objects, one per row; or {length} columns of {count} rows each. For one "
        "object per row, mark it in the collate_fn, as anybatch.SampleList(...); for columns, make it a dict."
    )


def _rows_of_columns(batch: Batch) -> int:
    """Count the rows of a tensor, or of a tuple, list or dict of tensors, the most frequent batches; return 0 for others."""
    columns = (batch,) if isinstance(batch, Tensor) else batch.values() if type(batch) is dict else batch
    if type(columns) is not tuple and type(batch) is not dict and (type(columns) is not list or len(columns) > 2):
        return 0  # a longer list may hold samples
    counts = {column.shape[0] if isinstance(column, Tensor) and column.dim() > 0 else 0 for column in columns}
    return counts.pop() if len(counts) == 1 else 0


def _count_leaves(batch: Batch) -> int:
    # leaves outside of nested lists and tuples can be read in one way only
    counts = _counts(batch, lambda path, value: is_sequence(value) and (path != "" or holds_objects(value)))
    if not counts:
        counts = _counts(batch, lambda _, value: is_sequence(value) and (is_marked(value) or holds_objects(value)))
        if len({count for _, count in counts}) > 1:
            # tuple(zip(*samples)): each list has one object per row
            counts = _lists_alone(batch) or counts
    if not counts:
        described = f"{type(batch).__name__} {batch!r}"[:80]
        raise BatchError(
            f"this batch has no rows: {described} holds no tensor of one or more dimensions. Give a nesting with "
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


def _counts(batch: Batch, is_leaf: IsLeaf) -> list[tuple[str, int]]:
    """List (path, rows) of arrays and of lists of per-row objects."""
    found = []
    for path, leaf in leaves(batch, is_leaf):
        if is_array(leaf):
            if len(leaf.shape) > 0:
                found.append((path, leaf.shape[0]))
        elif is_sequence(leaf) and (is_marked(leaf) or holds_objects(leaf)):
            found.append((path, len(leaf)))
    return found


def _lists_alone(batch: Batch) -> list[tuple[str, int]]:
    """List (path, length) of the lists of a batch that holds only lists, two or more, each of similar objects."""
    held = children(batch) or []
    is_all = len(held) > 1 and all(is_sequence(child) and child and are_alike(child) for _, child in held)
    return [(step, len(child)) for step, child in held] if is_all else []


def _check_sequences(batch: Batch, count: int) -> None:
    """Check that nested lists, which counting skipped, agree with `count` in one of their two readings."""
    is_per_row, containers = per_row_lists(count), dict[str, Any]()

    def is_leaf(path: str, value: Any) -> bool:
        containers[path] = value
        return is_per_row(path, value)

    for path, leaf in leaves(batch, is_leaf):
        if is_array(leaf) and len(leaf.shape) > 0 and leaf.shape[0] != count:
            parent = max((other for other in containers if other != path and path.startswith(other)), key=len)
            raise BatchError(
                f"the leaves of this batch disagree on the number of rows: the batch has {count}, batch{path} "
                f"has {leaf.shape[0]}, and batch{parent} is a list of {len(containers[parent])}. A list must hold columns of "
                f"{count} rows or {count} per-row objects."
            )


# Taking and splitting rows


def read(batch: Batch) -> Batch:
    """Return the batch, marked if it is a list of samples."""
    return as_samples(batch) if _rows_of_columns(batch) == 0 and holds_samples(batch) else batch


def take_rows(batch: Batch, row_numbers: RowNumbers | list[int]) -> Batch:
    """Take some rows of a batch.

    Args:
        batch: Any nesting of tensors that share their first dimension.
        row_numbers: A slice, for which tensors become views, or a list or tensor of row numbers, which are copied.

    Returns:
        The same nesting with only these rows, in this order.

    Raises:
        BatchError: If the rows of the batch cannot be counted.

    Example:
        >>> take_rows({"x": torch.arange(4), "name": ["a", "b", "c", "d"]}, [2, 0])
        {'x': tensor([2, 0]), 'name': ['c', 'a']}
    """
    chosen = torch.tensor(row_numbers, dtype=torch.long) if isinstance(row_numbers, list) else row_numbers
    return take(read(batch), chosen, rows_to_cut(batch))


def take(batch: Batch, chosen: RowNumbers, count: int) -> Batch:
    """Take rows of a batch that `read` returned and that has `count` rows."""
    return map_leaves(batch, lambda _, leaf: _take_leaf(leaf, chosen), per_row_lists(count))


def _take_leaf(leaf: Any, chosen: RowNumbers) -> Any:
    if is_array(leaf):
        if len(leaf.shape) == 0:
            return leaf
        if isinstance(chosen, slice):
            return leaf[chosen]
        if isinstance(leaf, Tensor):
            return leaf.index_select(0, chosen.to(leaf.device, non_blocking=True))
        return leaf[chosen.numpy(force=True)]
    if is_sequence(leaf) and len(leaf) > 0:
        taken = leaf[chosen] if isinstance(chosen, slice) else [leaf[number] for number in chosen.tolist()]
        return rebuild(as_samples(leaf), list(taken))
    return leaf


def split_rows(batch: Batch, sizes: list[int]) -> list[Batch]:
    """Split a batch into parts of `sizes` consecutive rows, which add up to all rows. Tensors become views."""
    stops = list(accumulate(sizes))
    if _rows_of_columns(batch) > 0:  # a tensor, or a container of tensors
        if isinstance(batch, Tensor):
            return _split_leaf(batch, stops)
        columns = [_split_leaf(child, stops) for _, child in children(batch) or ()]
        return [rebuild(batch, list(parts)) for parts in zip(*columns, strict=True)]
    batch = read(batch)
    found = {path: _split_leaf(leaf, stops) for path, leaf in leaves(batch, per_row_lists(sum(sizes)))}

    def part(number: int) -> Batch:
        return map_leaves(batch, lambda path, _: found[path][number], lambda path, _: path in found)

    return [part(number) for number in range(len(stops))]


def _split_leaf(leaf: Any, stops: list[int]) -> list[Any]:
    if isinstance(leaf, Tensor):
        return list(leaf.tensor_split(stops[:-1])) if leaf.dim() > 0 else [leaf] * len(stops)
    return [_take_leaf(leaf, slice(start, stop)) for start, stop in pairwise([0, *stops])]


# Joining rows: the inverse of splitting


def join_rows(parts: Sequence[Batch]) -> Batch:
    """Join the rows of all parts, in order, into one nesting. Differentiable.

    Tensors are concatenated along dim 0, and so are lists of per-row objects. A 0-dim tensor or a single object belongs to no
    row and must be equal in every part.

    >>> join_rows([{"x": torch.tensor([1, 2]), "id": ["a", "b"]}, {"x": torch.tensor([3]), "id": ["c"]}])
    {'x': tensor([1, 2, 3]), 'id': ['a', 'b', 'c']}
    """
    return _join(list(parts), "")


def reorder_rows(batch: Batch, order: Sequence[int]) -> Batch:
    """Reorder the rows of a batch that `join_rows` made. Differentiable.

    >>> reorder_rows({"x": torch.tensor([1, 2]), "id": ["a", "b"], "scale": 2.0}, [1, 0])
    {'x': tensor([2, 1]), 'id': ['b', 'a'], 'scale': 2.0}
    """

    def reordered(_: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf if leaf.dim() == 0 else leaf.index_select(0, tensor_on(order, leaf.device))
        return rebuild(leaf, [leaf[row] for row in order]) if _is_joined_list(leaf) else leaf

    return map_leaves(batch, reordered, lambda _, value: _is_joined_list(value))


def _join(parts: list[Batch], path: str) -> Batch:
    last = parts[-1]
    if isinstance(last, Tensor):
        return _join_tensors(parts, path)
    held = [children(part) for part in parts]
    if held[-1] is None:
        return _single(parts, path)
    if all(_is_joined_list(part) for part in parts):
        return rebuild(last, [item for part in parts for item in part])
    steps = [None if items is None else [step for step, _ in items] for items in held]
    for number, other in enumerate(steps):
        if other != steps[-1]:
            raise BatchError(
                f"the parts are not nested alike: batch{path} holds {other} in part {number} and {steps[-1]} in part "
                f"{len(parts) - 1}. Return the same nesting for every micro-batch; ragged rows can be padded to one length."
            )
    columns = zip(*(items or () for items in held), strict=True)
    return rebuild(last, [_join([child for _, child in column], path + column[0][0]) for column in columns])


def _join_tensors(parts: list[Batch], path: str) -> Tensor:
    last = parts[-1]
    shapes = [tuple(part.shape) if isinstance(part, Tensor) else part for part in parts]
    if last.dim() == 0:
        _single([part.detach() if isinstance(part, Tensor) else part for part in parts], path)
        return parts[-1]  # type: ignore[no-any-return]
    if any(not isinstance(shape, tuple) or shape[1:] != tuple(last.shape[1:]) or not shape for shape in shapes):
        raise BatchError(
            f"batch{path} has shapes {', '.join(map(str, shapes))} in the micro-batches, which differ beyond dim 0: they "
            "cannot be joined. Make every row alike, for example by padding to one length."
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _single(parts: list[Batch], path: str) -> Batch:
    """Return a value that belongs to no row, and must be equal in every part."""
    last = parts[-1]
    for number, part in enumerate(parts):
        if isinstance(last, Tensor) and isinstance(part, Tensor):
            is_same = torch.equal(part, last)
        else:
            is_same = part is last or bool(part == last)
        if not is_same:
            raise BatchError(
                f"batch{path} belongs to no row, but is {part!r} in part {number} and {last!r} in the last. Give it one "
                "entry per row (dim 0), or the same value in every micro-batch."
            )
    return last


def _is_joined_list(value: Batch) -> bool:
    """Return True for lists with one object per row: marked ones, and those of strings, numbers and the like."""
    if is_marked(value) or not is_sequence(value) or len(value) == 0:
        return is_marked(value)
    return all(not isinstance(item, Tensor) and children(item) is None for item in value)


# Devices, and rows in another dim than 0


def move(batch: Batch, device: torch.device) -> Batch:
    """Move every tensor to `device`."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def tensor_on(numbers: Sequence[float], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Make a tensor on `device` without waiting for the device, unlike `torch.tensor(numbers, device=device)`."""
    return torch.tensor(numbers, dtype=dtype, device="cpu").to(device, non_blocking=True)


def rows_first(batch: Batch, dim: int) -> Batch:
    """Move dim `dim` of every tensor to dim 0, as a view; tensors with fewer dims have their rows there already.

    >>> [tuple(tensor.shape) for tensor in rows_first((torch.zeros(7, 4, 3), torch.zeros(4)), 1)]
    [(4, 7, 3), (4,)]
    """
    return map_tensors(batch, lambda tensor: tensor.movedim(dim, 0) if tensor.dim() > dim else tensor)


def rows_in_dim(batch: Batch, dim: int) -> Batch:
    """Invert `rows_first`. Tensors are made contiguous, because models call .view() on them."""
    return map_tensors(batch, lambda tensor: tensor.movedim(0, dim).contiguous() if tensor.dim() > dim else tensor)


def check_row_dim(model: nn.Module, batch: Batch) -> None:
    """Refuse a batch cut along dim 0 if dim 1 may be the rows: the model takes time first, and all leaves agree on both."""
    if isinstance(batch, Mapping) and "attention_mask" in batch:
        return  # tokenizers return rows x tokens
    layers = (
        f"{name} ({type(module).__name__})" for name, module in model.named_modules() if _takes_time_first(module)
    )
    layer = next(layers, None)
    if layer is None:
        return
    try:
        time, rows = num_rows(batch), num_rows(rows_first(batch, 1))
    except BatchError:
        return  # the leaves agree on dim 0 alone
    raise BatchError(
        f"{layer} takes time first and rows second (batch_first=False), and this batch has {time} entries in dim 0 and {rows} "
        f"in dim 1 of all its tensors: either may be its rows. Say which: micro_batch=Rows(n, batch_dim=1) for (time, rows), "
        "Rows(n, batch_dim=0) for (rows, time)."
    )


def _takes_time_first(module: nn.Module) -> bool:
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        return not module.self_attn.batch_first
    return isinstance(module, nn.RNNBase) and not module.batch_first


# Lists: which of them have one entry per row


class SampleList(list[Any]):
    """A list with one sample per row, for batches that could also be read as a list of columns.

    Use it as a `collate_fn`, or for a list inside a batch. It takes an iterable of samples, as `list` does.

    Example:
        >>> from anybatch import num_rows
        >>> import torch
        >>> num_rows(SampleList([torch.zeros(12), torch.zeros(12), torch.zeros(12)]))
        3
    """


class SampleTuple(tuple[Any, ...]):
    """A tuple with one sample per row."""


def is_marked(sequence: Batch) -> bool:
    return isinstance(sequence, SampleList | SampleTuple)


def as_samples(sequence: Any) -> Any:
    """Mark a list or tuple as one sample per row, so that its parts are not read as columns."""
    if is_marked(sequence) or not is_sequence(sequence) or holds_objects(sequence):
        return sequence
    if type(sequence) is list:
        return SampleList(sequence)
    return SampleTuple(sequence) if type(sequence) is tuple else sequence


def per_row_lists(count: int) -> IsLeaf:
    """Return a function that is True for lists with one object per row, in a batch of `count` rows that `read` returned."""

    def is_leaf(path: str, value: Any) -> bool:
        if not is_sequence(value):
            return False
        if is_marked(value) or holds_objects(value):
            return True
        # the batch itself holds columns, even if it has as many as rows
        if not path or len(value) != count:
            return False
        # [[1, 2], [3, 4]] in a batch of two rows: without a tensor inside, it is one list per row
        return not _are_columns(value, count) or (not has_array(value) and any(item is not None for item in value))

    return is_leaf


def holds_objects(sequence: Any) -> bool:
    """Return True for a list of strings, numbers or other single objects, which is always one per row."""
    has_object = False
    for item in sequence:
        if is_array(item) or children(item) is not None:
            return False
        has_object = has_object or item is not None
    return has_object


def _are_columns(batch: Batch, count: int) -> bool:
    """Return True if every leaf inside has `count` rows in one of its readings."""

    def is_leaf(path: str, value: Any) -> bool:
        return is_sequence(value) and (holds_objects(value) or (path != "" and len(value) == count))

    def fits(leaf: Any) -> bool:
        if is_array(leaf):
            return len(leaf.shape) == 0 or bool(leaf.shape[0] == count)
        return not is_sequence(leaf) or len(leaf) in (0, count)

    return all(fits(leaf) for _, leaf in leaves(batch, is_leaf))


def holds_samples(batch: Batch) -> bool:
    """Return True for a batch that is a list of samples, one per row; raise if it can also be read as columns.

    A tuple holds columns, unless it holds similar records with numbers in them, such as (image, label).
    """
    if is_marked(batch):
        return True
    if type(batch) not in (list, tuple) or len(batch) == 0 or not has_array(batch) or not are_alike(batch):
        return False
    first = batch[0]
    collated = list(_collated_leaves(batch))
    # collation makes tensors of numbers
    is_collated = all(_are_strings(leaf) or (is_array(leaf) and len(leaf.shape) > 0) for leaf in collated)
    # members of different kinds, such as (image, label), make a record, not a list of rows
    is_record = len({_kind(child) for _, child in children(first) or ()}) > 1
    if type(batch) is tuple:
        return is_record and not is_collated
    if not is_collated or (is_record and type(first) is tuple):
        return True
    columns = _rows_as_columns(batch)
    # a mapping of matrices is rows x tokens; one sample is a mapping of vectors
    is_encoding = isinstance(first, Mapping) and all(is_array(held) and len(held.shape) > 1 for held in first.values())
    is_column = is_array(first) or is_encoding
    if columns == 0 and not is_column:
        return True
    if columns > 0 and is_column and len(batch) <= 2:
        return False  # default_collate returns these for samples of one or two tensors or encodings
    # tensors of different lengths are refused too: two that happen to be equally long would be read as columns
    lengths = list(dict.fromkeys(map(len, collated)))
    written = ", ".join(map(str, lengths[:4])) + (", ..." if len(lengths) > 4 else "")
    sizes = f"of {columns} rows each" if columns else f"that disagree on their rows ({written})"
    raise BatchError(
        f"this list of {len(batch)} can be read in two ways: {len(batch)} samples, one per row; or {len(batch)} columns "
        f"{sizes}. For samples, give Rows(n, collate=...) or Tokens(n, collate=...), which collates those of each "
        "micro-batch, or have the loader say so by collate_fn=anybatch.SampleList. For columns, give a tuple or a dict "
        "instead of a list: collate_fn=lambda samples: tuple(default_collate(samples))."
    )


def has_array(batch: Batch) -> bool:
    """Return True if there is a tensor or array of one or more dims anywhere inside."""
    return any(is_array(leaf) and len(leaf.shape) > 0 for _, leaf in leaves(batch))


def are_alike(sequence: Any) -> bool:
    """Return True for objects with the same type, keys, dtypes and numbers of dims; lengths may differ."""
    return len({_kind(item) for item in sequence}) == 1


def _kind(value: Batch) -> object:
    """Return a key that is equal for samples of one dataset."""
    if is_array(value):
        return "array", str(value.dtype), len(value.shape)
    held = children(value)
    if held is None:
        return "object", type(value)
    if is_sequence(value):
        return type(value), frozenset(_kind(child) for _, child in held)
    return type(value), tuple((step, _kind(child)) for step, child in held)


def _collated_leaves(batch: Batch) -> Iterator[Any]:
    """Yield the leaves other than None; a list of strings, which collation does not change, is one leaf."""
    return (leaf for _, leaf in leaves(batch, lambda _, value: _are_strings(value)) if leaf is not None)


def _are_strings(value: Batch) -> bool:
    return is_sequence(value) and len(value) > 0 and all(isinstance(item, str | bytes) for item in value)


def _rows_as_columns(batch: Any) -> int:
    """Count the rows of a list of similar, collated objects, read as columns; 0 if they cannot be columns."""
    sizes = [[len(leaf) for leaf in _collated_leaves(item)] for item in batch]
    if len({size for own in sizes for size in own}) == 1:
        return sizes[0][0]
    is_zipped = (
        all(is_sequence(column) and len(column) > 1 and are_alike(column) for column in batch)
        and len({len(column) for column in batch}) == 1
        and (all(own == sizes[0] for own in sizes) or any(len(set(own)) > 1 for own in sizes))
    )
    return len(batch[0]) if is_zipped else 0
