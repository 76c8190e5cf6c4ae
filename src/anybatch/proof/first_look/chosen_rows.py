"""A few rows of a batch, as different from each other as it has them, in two parts that differ most."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from anybatch.batches import Batch, Dealt, MicroBatches, Rows, Tokens, num_rows, take_rows, tensors
from anybatch.passes import Accumulator, has_rows

MOST_ROWS = 8
IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Some rows of a batch, in one piece, and how they are taken apart."""

    batch: Batch
    num_rows: int
    parts: tuple[tuple[int, ...], ...]
    """Numbers of its rows: two parts that differ, in size too."""
    mixed_parts: tuple[tuple[int, ...], ...]
    """Two others, each with rows of every kind."""


def choose_rows(accumulator: Accumulator, batch: Batch) -> Sample | str | None:
    """The rows to look at; what stands in the way, in words; None where the batch is not cut, and any loss is exact."""
    if isinstance(batch, Dealt):
        if batch.is_stand_in:
            return "this rank has no rows"
        batch = batch.batch
    if not has_rows(batch):
        return "this rank has no rows"
    is_alone = accumulator.engine.ranks.size == 1
    if isinstance(batch, MicroBatches):
        if len(batch) == 1 and is_alone:
            return None
        largest = max(batch, key=num_rows)
        return _sample(largest, num_rows(largest)) or "its micro-batches have one row each"
    size = _size_of_micro_batches(accumulator, batch)
    if size is None and is_alone:
        return None
    split = accumulator.split
    if isinstance(split, Tokens) and split.collate is not None:
        batch = split.collate([batch[row] for row in _spread(len(batch), max(2, min(size or MOST_ROWS, MOST_ROWS)))])
    return _sample(batch, size or MOST_ROWS) or "the batch has one row"


def _size_of_micro_batches(accumulator: Accumulator, batch: Batch) -> int | None:
    """How many rows the first micro-batch will have; None where it has all of them."""
    split = accumulator.split
    if type(split) is Rows:
        return split.size if num_rows(batch) > split.size else None
    choose_for = getattr(split, "choose_for", None)
    if choose_for is not None:
        choose_for(accumulator.workload, batch)  # what the update begins with
    rows = copy.deepcopy(accumulator.split).cut(batch).row_numbers  # one that learns must not learn from this
    return len(rows[0]) if len(rows) > 1 else None


def _sample(batch: Batch, size: int) -> Sample | None:
    count = num_rows(batch)
    wanted = min(count, max(2, min(size, MOST_ROWS)))
    if wanted < 2:
        return None
    order = _by_kind(batch, count)
    chosen = [order[place] for place in _spread(count, wanted)]
    few = max(1, wanted // 3)
    numbers = range(wanted)
    mixed = tuple(numbers[1::3]) or (0,)
    return Sample(
        batch=take_rows(batch, chosen),
        num_rows=wanted,
        parts=(tuple(numbers[:few]), tuple(numbers[few:])),
        mixed_parts=(mixed, tuple(number for number in numbers if number not in mixed)),
    )


def _spread(count: int, wanted: int) -> list[int]:
    """Numbers from the first to the last, evenly."""
    wanted = min(wanted, count)
    return [round(index * (count - 1) / max(wanted - 1, 1)) for index in range(wanted)]


def _by_kind(batch: Batch, count: int) -> list[int]:
    """The rows sorted by what a count may depend on: entries that are ignored or 0, then classes, then weights."""
    columns = [column.detach().reshape(count, -1) for column in tensors(batch) if column.dim() and len(column) == count]
    columns = [column for column in columns if column.numel() and not column.is_complex()]
    whole = [column for column in columns if not column.is_floating_point()]
    narrow = [column for column in columns if column.is_floating_point() and column.shape[1] == 1]
    keys = [_sum([((column == 0) | (column == IGNORED)).sum(1) for column in whole], count)]
    keys += [_sum([column.sum(1) for column in whole], count), _sum([column.sum(1) for column in narrow], count)]
    told = [key.double().cpu().tolist() for key in keys]
    return sorted(range(count), key=lambda row: tuple(key[row] for key in told))


def _sum(each: list[Tensor], count: int) -> Tensor:
    total = torch.zeros(count, dtype=torch.float64 if not each or each[0].device.type != "mps" else torch.float32)
    for one in each:
        total = total + one.cpu()
    return total
