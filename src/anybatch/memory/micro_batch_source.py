"""Micro-batches of any shape, made of one batch."""

from dataclasses import dataclass

import torch

from anybatch.core import Batch, map_tensors, num_rows, take_rows, tensors
from anybatch.memory.envelope import PassShape
from anybatch.memory.meter import bytes_of
from anybatch.ragged import RowLengths, Tokens, narrow, padded_dims

SHORTEST = 4
"""Rows shorter than this are planned as if all were as long as the longest: three lengths are needed for a curve."""


@dataclass(frozen=True, slots=True)
class MicroBatchSource:
    """A batch to take micro-batches from; rows repeat where it has too few."""

    batch: Batch
    num_rows: int
    row_length: int | None = None
    """The longest row, where sizes are counted in tokens."""
    lengths: RowLengths | None = None
    """How long rows are, where they differ."""

    @property
    def longest(self) -> int | None:
        """The length that varies at its longest; None where it does not vary."""
        return None if self.lengths is None else self.row_length

    @property
    def nbytes(self) -> int:
        """Bytes of the batch during an update. Cutting ragged rows copies everything but the padding."""
        whole = bytes_of(tensors(self.batch))
        if self.lengths is None:
            return whole
        return whole + round(whole * sum(self.lengths.lengths) / (self.num_rows * self.lengths.width))

    def micro_batch(self, shape: PassShape) -> Batch:
        """Rows of the batch, cut to a length if there is one."""
        rows, length = shape
        chosen = slice(0, rows) if rows <= self.num_rows else torch.arange(rows) % self.num_rows
        taken = take_rows(self.batch, chosen)
        if length is None or self.lengths is None:
            return taken
        trimmed = narrow(taken, slice(0, length), self.lengths.dims)
        return map_tensors(trimmed, torch.Tensor.contiguous)  # as the split hands them over

    def all_rows(self, size: int) -> tuple[Batch, ...]:
        """The whole batch in micro-batches of `size` rows."""
        stops = range(0, self.num_rows, size)
        return tuple(take_rows(self.batch, slice(start, start + size)) for start in stops)


def micro_batch_source_of(batch: Batch, tokens: Tokens | None) -> MicroBatchSource:
    """The batch as a split sees it."""
    if tokens is None:
        return MicroBatchSource(batch, num_rows(batch))
    lengths = tokens.measure(batch)
    if tokens.collate is not None:
        batch = tokens.collate(list(batch))
        width = next((tensor.shape[1] for tensor in tensors(batch) if tensor.dim() > 1), lengths.width)
        dims = padded_dims(batch, width=width, count=num_rows(batch))
        lengths = RowLengths(lengths=lengths.lengths, width=width, dims=dims)
    count, longest = num_rows(batch), max(lengths.lengths)
    if min(lengths.lengths) < longest and longest >= SHORTEST:
        return MicroBatchSource(batch, count, longest, lengths)
    return MicroBatchSource(narrow(batch, lengths.columns(longest), lengths.dims), count, longest)
