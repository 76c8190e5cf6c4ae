"""The rows of the first batch that a self-check looks at, and what looking at them takes."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from anybatch.batches import Batch, Dealt, MicroBatches, Rows, Tokens, num_rows, take_rows, tensors, why_rows_stay
from anybatch.options import Autocast
from anybatch.parallel import unwrapped
from anybatch.passes import Accumulator, has_rows
from anybatch.proof.cases import copy_batch, is_below, roundoff, why_not_raised
from anybatch.proof.first_look import PENDING, FirstLook, by_kind, spread_evenly

FEWEST_ROWS = 3
"""Of a sample: fewer cannot be cut unevenly."""
COARSE = 1e-6
"""Roundoff above which a gradient says too little in its own precision: it is compared in fp32."""

Take = Callable[[], Batch]
"""What takes rows out of the batch: each time a copy, which a run may write to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRows:
    """Rows from all over the batch, as different from each other as it has them."""

    compared: Take
    """Three quarters of a micro-batch's, half of that where numbers are raised to twice their bytes; 3 at least.

    So all of them in one go, beside a copy of them, take no more than a micro-batch. Those with the fewest targets come first:
    the first part of an uneven cut, which is the smallest, then has fewer units than any other, and no wrong count is right.
    """
    explained: Take
    """As many as a micro-batch has, in their own order: for `verify`, which looks for the cause where these do not agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCost:
    """What comparing gradients takes, by what updates take: never more than one in micro-batches of `size`, and `copied`."""

    copied: int = 0
    """Bytes of weights in bf16 and fp16, raised."""
    fewest: int = FEWEST_ROWS
    """Rows, however small micro-batches are."""

    def size(self, size: int, *, one: int = 1) -> int:
        """The size of the update that takes as much, for micro-batches of `size`; `one` is that of one row."""
        return max(3 * size // 4, self.fewest * one)


def check_cost(model: nn.Module, autocast: Autocast) -> CheckCost:
    """That of this model."""
    if not is_coarse(model, autocast):
        return CheckCost()
    low = [held for held in (*model.parameters(), *model.buffers()) if is_below(held.dtype, torch.float32)]
    return CheckCost(copied=sum(4 * held.numel() for held in low), fewest=2 * FEWEST_ROWS)


def is_coarse(model: nn.Module, autocast: Autocast) -> bool:
    """True where gradients are compared in fp32, because they pass through a coarser precision."""
    fast = autocast if isinstance(autocast, torch.dtype) else getattr(autocast, "fast_dtype", None)
    return roundoff((*model.parameters(), *model.buffers()), fast) > COARSE and why_not_raised(model) is None


def checked_rows(accumulator: Accumulator, batch: Batch) -> CheckedRows | FirstLook:
    """Those of this batch; or why there are none."""
    if isinstance(batch, Dealt):
        batch = batch.batch
    if not has_rows(batch):
        return FirstLook(finding="not judged", reason="this rank has no rows")
    why = why_rows_stay(accumulator.split, batch)
    if why is not None:
        return FirstLook(finding="not judged", reason=why)
    if isinstance(batch, MicroBatches):
        part = next((part for part in batch if num_rows(part) >= FEWEST_ROWS), None)
        if part is None:
            return PENDING
        count = num_rows(part)
        compared = _num_compared(accumulator, count, count, is_cut=len(batch) > 1)
        return CheckedRows(compared=_by_kind(part, count, compared), explained=lambda: copy_batch(part))
    choose_for = getattr(accumulator.split, "choose_for", None)
    if choose_for is not None:
        choose_for(accumulator.workload, batch)  # what the update would begin with
    plain = getattr(getattr(accumulator.split, "choice", None), "plain_rows", None)
    if plain == 0:
        return FirstLook(finding="not judged", reason="no row fits without checkpointing, and copies run without it")
    split = copy.deepcopy(accumulator.split)  # one that learns must not learn from this
    cut = split.cut(batch)
    count = sum(map(len, cut.row_numbers))
    if count < FEWEST_ROWS:
        return PENDING
    explained = min(count, max(FEWEST_ROWS, len(cut.row_numbers[0])))
    size = min(_rows_of_largest(cut, batch, count), plain or count)
    compared = _num_compared(accumulator, size, count, is_cut=len(cut) > 1)
    if isinstance(split, Rows | Tokens) and split.collate is not None:
        few, many = (split.collate([batch[row] for row in spread_evenly(count, one)]) for one in (compared, explained))
        return CheckedRows(
            compared=lambda: copy_batch(few), explained=lambda: copy_batch(many)
        )  # again, it may be another
    order = by_kind(batch, count)
    rows = sorted(order[place] for place in spread_evenly(count, explained))
    return CheckedRows(compared=_by_kind(batch, count, compared), explained=lambda: take_rows(batch, rows))


def _by_kind(batch: Batch, count: int, wanted: int) -> Take:
    order = by_kind(batch, count)
    rows = [order[place] for place in reversed(spread_evenly(count, wanted))]
    return lambda: take_rows(batch, rows)


def _num_compared(accumulator: Accumulator, size: int, count: int, *, is_cut: bool) -> int:
    size = size if is_cut else count // 2  # beside the rows of a batch that is not cut there are no gradients
    parts = 8 if is_coarse(unwrapped(accumulator.model), accumulator.running.autocast) else 4
    return min(count, max(FEWEST_ROWS, 3 * size // parts))


def _rows_of_largest(cut: MicroBatches, batch: Batch, count: int) -> int:
    """How many rows of the batch, with all their padding, are as much as its largest micro-batch."""
    largest = max(map(len, cut.row_numbers))
    if cut.cut is not None:
        largest = min(largest, cut.cut.largest // max(cut.cut.lengths))
    whole = sum(tensor.nbytes for tensor in tensors(batch))
    padded = max(sum(tensor.nbytes for tensor in tensors(part)) for part in cut)
    return min(largest, max(count * padded // whole, 1)) if whole else largest
