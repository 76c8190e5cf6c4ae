"""Smaller micro-batches after some that did not fit."""

from dataclasses import dataclass

from anybatch.batches.cutting import Cut
from anybatch.batches.nesting import Batch
from anybatch.batches.splits import MicroBatches, Rows, Shrinking, Split
from anybatch.errors import BatchError


@dataclass(frozen=True, slots=True)
class AsGiven:
    """The split of batches that came cut already: it leaves them as they are."""

    def cut(self, batch: Batch) -> MicroBatches:
        """`batch` itself."""
        assert isinstance(batch, MicroBatches)
        return batch


@dataclass(frozen=True, slots=True)
class Within:
    """The micro-batches of another split, those of more than `size` rows cut further.

    >>> import torch
    >>> [len(part) for part in Within(AsGiven(), 4).cut(MicroBatches((torch.zeros(7), torch.zeros(3))))]
    [4, 3, 3]
    """

    split: Split
    size: int

    def cut(self, batch: Batch) -> MicroBatches:
        """Every micro-batch of the other split, in its order, in near-equal parts of at most `size` rows."""
        whole = self.split.cut(batch)
        pieces = [Rows(self.size).cut(micro_batch).micro_batches for micro_batch in whole]
        parts = [part for together in pieces for part in together]
        if whole.cut is None:
            return MicroBatches(parts)
        numbers = [Rows(self.size).cut(list(rows)).micro_batches for rows in whole.cut.rows]
        return MicroBatches(
            parts,
            Cut(
                rows=tuple(tuple(part) for together in numbers for part in together),
                lengths=tuple(
                    length
                    for together, length in zip(numbers, whole.cut.lengths, strict=True)
                    for _ in range(len(together))
                ),
            ),
        )


def smaller(split: Split, ran: MicroBatches) -> Split | None:
    """The split to use after `ran`, which `split` cut, did not fit; None where no micro-batch can be made smaller.

    A split that has `shrink` says itself; the micro-batches of any other are cut in half.
    """
    shrunk = split.shrink(ran) if isinstance(split, Shrinking) else None
    if shrunk is not None:
        return shrunk
    try:
        most = max(len(rows) for rows in ran.row_numbers)
    except BatchError:
        return None  # micro-batches of the user's own making, whose rows nobody can count
    if most == 1:
        return None
    return Within(split.split if isinstance(split, Within) else split, most // 2)
