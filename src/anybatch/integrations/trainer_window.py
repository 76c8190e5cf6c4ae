"""The batches that a Trainer collects for one update, made one batch that can be cut."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from anybatch.core import Batch, Cut, MicroBatches, Rows, Split, join_rows, num_rows, tensors
from anybatch.errors import BatchError

IGNORED = -100
PER_PAIR_ROWS = ("input_ids", "attention_mask", "completion_mask", "token_type_ids", "position_ids")
"""Of preferences, what has a row for the chosen and, below all of them, one for the rejected answer of each pair."""


class StandIn(dict[str, Any]):
    """A row for a rank that was dealt none: it runs where all ranks have to, and counts for nothing."""


@dataclass(frozen=True, slots=True)
class EachBatch(Split):
    """Cuts a window, which is a tuple of batches: each stays as it is, or becomes micro-batches of at most `size` rows.

    >>> import torch
    >>> [len(part) for part in EachBatch(2).cut((torch.zeros(3), torch.zeros(2)))]
    [2, 1, 2]
    """

    size: int | None = None

    def cut(self, window: Batch) -> MicroBatches:
        """The micro-batches of all batches, in their order."""
        if self.size is None:
            stops = [0, *accumulate(_rows_in(batch) for batch in window)]
            rows = tuple(tuple(range(start, stop)) for start, stop in pairwise(stops))
            return MicroBatches(tuple(window), Cut(rows=rows, lengths=(0,) * len(rows)))
        return MicroBatches([part for batch in window for part in Rows(self.size).cut(batch)])

    def shrink(self, ran: MicroBatches) -> "EachBatch | None":
        """Half the rows of the largest micro-batch."""
        largest = max(_rows_in(micro_batch) for micro_batch in ran)
        return EachBatch(largest // 2) if largest > 1 else None

    def state_dict(self) -> dict[str, Any]:
        """What fitted, as a plain value."""
        return {"size": self.size}


def _rows_in(batch: Batch) -> int:
    """Its rows; where tokens lie in one long row, with an offset for each text, the offsets."""
    try:
        return num_rows(batch)
    except BatchError:
        return min(len(tensor) for tensor in tensors(batch) if tensor.dim() > 0)


def joined(window: Sequence[Mapping[str, Any]], pad_id: int) -> Mapping[str, Any]:
    """One batch with the rows of all, padded to the widest on the side that they are padded on.

    Labels are padded with the ignored index, tokens with `pad_id`, all else with 0.
    """
    is_left = any(_is_left(batch.get("attention_mask")) for batch in window)
    widths = {
        key: max(batch[key].shape[1] for batch in window)
        for key, value in window[0].items()
        if isinstance(value, Tensor) and value.dim() > 1
    }

    def widened(batch: Mapping[str, Any]) -> dict[str, Any]:
        return {key: _widened(key, value, widths.get(key), pad_id, is_left) for key, value in batch.items()}

    joined_rows: Mapping[str, Any] = join_rows([widened(batch) for batch in window])
    return joined_rows


def as_pairs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Preferences with a row per pair: what was [chosen; rejected] has the two of each pair in dim 1.

    >>> import torch
    >>> as_pairs({"input_ids": torch.tensor([[1], [2], [-1], [-2]])})["input_ids"][:, :, 0].tolist()
    [[1, -1], [2, -2]]
    """
    return {
        key: value.unflatten(0, (2, -1)).transpose(0, 1) if key in PER_PAIR_ROWS else value
        for key, value in batch.items()
    }


def from_pairs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `as_pairs`."""
    return {key: value.transpose(0, 1).flatten(0, 1) if key in PER_PAIR_ROWS else value for key, value in batch.items()}


def _is_left(mask: Any) -> bool:
    return isinstance(mask, Tensor) and mask.dim() == 2 and bool(((mask[:, 0] == 0) & (mask[:, -1] != 0)).any())


def _widened(key: str, value: Any, width: int | None, pad_id: int, is_left: bool) -> Any:
    if width is None or value.shape[1] == width:
        return value
    missing = width - value.shape[1]
    fill = IGNORED if "label" in key else pad_id if key.endswith("input_ids") else 0
    # F.pad counts dims from the last: the pair for dim 1 comes after one for each dim behind it
    return F.pad(value, [0, 0] * (value.dim() - 2) + ([missing, 0] if is_left else [0, missing]), value=fill)
