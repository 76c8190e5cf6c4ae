"""`BatchShape`: the part of a batch that decides its memory."""

import math
from dataclasses import dataclass

import torch

from anybatch.batches import Batch, Rows, Tokens, num_rows, tensors


@dataclass(frozen=True, slots=True)
class BatchShape:
    """How many rows, and the dtype and shape of each tensor's row."""

    rows: int
    tensors: tuple[tuple[torch.dtype, tuple[int, ...]], ...]

    @property
    def row_elements(self) -> int:
        """The numbers in one row."""
        return sum(math.prod(sizes) for _, sizes in self.tensors)

    def covers(self, other: "BatchShape") -> bool:
        """True if a batch of the other shape needs no more than one of this."""
        return (
            other.rows <= self.rows
            and len(other.tensors) == len(self.tensors)
            and all(
                dtype == own_dtype and len(sizes) == len(own) and all(a <= b for a, b in zip(sizes, own, strict=True))
                for (dtype, sizes), (own_dtype, own) in zip(other.tensors, self.tensors, strict=True)
            )
        )


def shape_of(batch: Batch, most: Rows | Tokens | None) -> BatchShape:
    """The shape of a batch as a split bounded by `most` sees it."""
    if isinstance(most, Tokens) and most.collate is not None:
        lengths = most.measure(batch).lengths
        return BatchShape(len(lengths), ((torch.long, (max(lengths),)),))
    return BatchShape(num_rows(batch), tuple((tensor.dtype, tuple(tensor.shape[1:])) for tensor in tensors(batch)))
