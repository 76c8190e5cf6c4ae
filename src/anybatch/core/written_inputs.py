"""Rows that a forward wrote into: given to it again, they are no longer the rows of the batch."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from anybatch.core.micro_batches import Dealt, MicroBatches
from anybatch.core.nesting import Batch, children
from anybatch.core.torch_private import num_writes
from anybatch.errors import BatchError


@dataclass(frozen=True, slots=True)
class WriteWatch:
    """How often each tensor of some rows had been written to, at one moment. Writes through `.data` or NumPy go unseen."""

    rows: Batch
    writes: tuple[int, ...]

    @classmethod
    def of(cls, rows: Batch) -> "WriteWatch":
        """The rows now."""
        return cls(rows, tuple(num_writes(tensor) for _, tensor in _tensors(rows)))

    def check(self, why: str) -> None:
        """Refuse rows that were written to since; `why` says what needs them as they were."""
        for (path, tensor), before in zip(_tensors(self.rows), self.writes, strict=True):
            if num_writes(tensor) != before:
                raise BatchError(
                    f"the forward writes into its input: batch{path} of shape {tuple(tensor.shape)} was changed in place, and "
                    f"{why} on rows that are no longer the batch's. Do not change the batch: x = x * 2 instead of x *= 2, "
                    "F.relu(x) instead of F.relu_(x) or nn.ReLU(inplace=True); or begin with x = x.clone()."
                )


def _tensors(rows: Batch, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor, and how it is reached."""
    if isinstance(rows, Tensor):
        yield path, rows
        return
    if isinstance(rows, Dealt):
        rows = rows.batch
    if isinstance(rows, MicroBatches):
        rows = rows.micro_batches
    for step, child in children(rows) or ():
        yield from _tensors(child, path + step)
