"""Which rows of the whole batch a micro-batch holds, for dropout that asks."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import nn

from anybatch.core import Batch, Dealt, MicroBatches, PassHook, Ranks, num_rows
from anybatch.dropout.keyed_dropout import Masks


@dataclass(frozen=True)
class NumberedRows(PassHook):
    """The rows of each micro-batch of one batch, by their numbers in the whole of it."""

    masks: Masks
    row_numbers: tuple[tuple[int, ...], ...]
    devices: set[torch.device]

    def around_forward(self, micro_batch: int) -> AbstractContextManager[object]:
        return self.masks.at(self.row_numbers[micro_batch], self.devices)

    def for_lent(self, lent: Batch) -> "NumberedRows":
        return replace(self, row_numbers=(tuple(range(num_rows(lent))),))


def number_rows(masks: Masks, model: nn.Module, cut: MicroBatches, batch: Batch, ranks: Ranks) -> NumberedRows:
    """Which rows of the whole batch each micro-batch holds.

    On several ranks they are as `Dealt` says, else the ranks' rows follow one another, which takes a small collective. A
    micro-batch that counts for nothing, because this rank has no row, may have any numbers.
    """
    own = [row for rows in cut.row_numbers for row in rows]
    if isinstance(batch, Dealt) and not batch.is_stand_in:
        numbers: Sequence[int] = batch.row_numbers
    else:
        counts = [] if isinstance(batch, Dealt) else ranks.gather([len(own)])[: ranks.rank]
        offset = int(sum(count for (count,) in counts))
        numbers = range(offset, offset + len(own))
    placed = [tuple(numbers[row] for row in rows) for rows in cut.row_numbers]
    parts = tuple(rows or tuple(range(num_rows(part))) for rows, part in zip(placed, cut, strict=True))
    return NumberedRows(masks, parts, {parameter.device for parameter in model.parameters()})
