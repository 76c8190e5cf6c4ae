"""Smaller micro-batches after some that did not fit."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

from anybatch.core.batch import num_rows, rows_to_cut, split_rows
from anybatch.core.micro_batches import Cut, CutsBatches, MicroBatches, Split, derived
from anybatch.core.nesting import Batch
from anybatch.core.splits import near_equal
from anybatch.errors import BatchError


@dataclass(frozen=True, slots=True)
class AsGiven(Split):
    """The split of batches that came cut already: it leaves them as they are."""

    def cut(self, batch: Batch) -> MicroBatches:
        """`batch` itself."""
        assert isinstance(batch, MicroBatches)
        return batch


@dataclass(frozen=True, slots=True)
class CutFurther(Split):
    """The micro-batches of another split, those of more than `size` rows cut further.

    >>> import torch
    >>> [len(part) for part in CutFurther(AsGiven(), 4).cut(MicroBatches((torch.zeros(7), torch.zeros(3))))]
    [4, 3, 3]
    """

    split: Split
    size: int

    def cut(self, batch: Batch) -> MicroBatches:
        """Every micro-batch of the other split, in its order, in near-equal parts of at most `size` rows."""
        whole = self.split.cut(batch)
        if whole.whole or whole.together > 1:
            return whole
        parts = [part for micro_batch in whole for part in self._parts(micro_batch)]
        return MicroBatches(parts, None if whole.cut is None else self._further(whole.cut))

    def resized(self, size: int) -> "CutFurther":
        """The same with at most `size` rows."""
        return CutFurther(self.split, size)

    def _parts(self, micro_batch: Batch) -> list[Batch]:
        # a batch that a split cut was read then; micro-batches that the user gave are read here for the first time
        count = rows_to_cut(micro_batch) if isinstance(self.split, AsGiven) else num_rows(micro_batch)
        return split_rows(micro_batch, near_equal(count, self.size)) if count > self.size else [micro_batch]

    def _further(self, cut: Cut) -> Cut:
        rows: list[tuple[int, ...]] = []
        lengths: list[int] = []
        for numbers, length in zip(cut.rows, cut.lengths, strict=True):
            stops = [0, *accumulate(near_equal(len(numbers), self.size))]
            rows += [numbers[start:stop] for start, stop in pairwise(stops)]
            lengths += [length] * (len(stops) - 1)
        return Cut(rows=tuple(rows), lengths=tuple(lengths))


def size_that_ran(split: Split, ran: MicroBatches) -> int:
    """The largest of these micro-batches, in what the split counts: tokens where it cut by them, else rows."""
    if ran.cut is not None and not isinstance(split, CutFurther):
        return ran.cut.largest
    return max(len(rows) for rows in ran.row_numbers)


def smaller(split: CutsBatches, ran: MicroBatches) -> Split | None:
    """The split to use after `ran`, which `split` cut, did not fit; None where no micro-batch can be made smaller.

    A split that has `shrink` says itself; the micro-batches of any other are cut in half, unless their rows belong together.
    """
    if ran.whole:
        return None
    split = derived(split)
    shrunk = split.shrink(ran)
    if shrunk is not None or ran.together > 1:
        return shrunk
    try:
        most = max(len(rows) for rows in ran.row_numbers)
    except BatchError:
        return None  # micro-batches of the user's own making, whose rows nobody can count
    if most == 1:
        return None
    return CutFurther(split.split if isinstance(split, CutFurther) else split, most // 2)
