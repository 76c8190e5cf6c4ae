"""Splits: policies that cut a batch into micro-batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from numbers import Integral
from typing import Any, Protocol, runtime_checkable

from anybatch.batches.cost import Cut
from anybatch.batches.counting import num_rows, split_rows
from anybatch.batches.nesting import Batch
from anybatch.errors import BatchError, SplitError


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """A batch already cut: micro-batches in the order they run.

    `Accumulator` and `Update` take one as they take a batch.
    """

    micro_batches: tuple[Batch, ...]
    cut: Cut | None
    """Which rows of the batch each micro-batch holds, and what they are padded to; None where rows are in their own order."""

    def __init__(self, micro_batches: "tuple[Batch, ...] | list[Batch]", cut: Cut | None = None) -> None:
        object.__setattr__(self, "micro_batches", tuple(micro_batches))
        object.__setattr__(self, "cut", cut)
        if not self.micro_batches:
            raise BatchError("MicroBatches() holds 0 micro-batches; give at least 1.")
        if cut is not None and len(cut.rows) != len(self.micro_batches):
            raise BatchError(
                f"MicroBatches() holds {len(self.micro_batches)} micro-batches, but its cut has {len(cut.rows)}; give one "
                "tuple of row numbers per micro-batch."
            )

    @property
    def row_numbers(self) -> tuple[tuple[int, ...], ...]:
        """The rows of the batch that each micro-batch holds: as it was cut, or else consecutive."""
        if self.cut is not None:
            return self.cut.rows
        stops = [0, *accumulate(num_rows(micro_batch) for micro_batch in self.micro_batches)]
        return tuple(tuple(range(start, stop)) for start, stop in pairwise(stops))

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.micro_batches)

    def __getitem__(self, index: int) -> Batch:
        return self.micro_batches[index]


@runtime_checkable
class Split(Protocol):
    """A policy that cuts a batch; every row lands in exactly one micro-batch."""

    def cut(self, batch: Batch) -> MicroBatches:
        """The micro-batches of `batch`, in the order they run."""


@runtime_checkable
class LearningSplit(Split, Protocol):
    """A split that wants to know how long its micro-batches took, to cut the next batch better."""

    def learn(self, ran: MicroBatches, seconds: Sequence[float | None]) -> None:
        """Called when the batch that was cut last has run; None stands for a micro-batch that was left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What runs on the micro-batches: all that the memory of an update depends on. The values are those of `Update`."""

    model: Any
    objective: Any
    optimizer: Any = None
    """None where the caller steps the optimizer."""
    running: Any = None
    """Its options, as one value."""


@runtime_checkable
class ChoosingSplit(Split, Protocol):
    """A split that chooses its size by the model, the optimizer and the objective that will run."""

    def choose_for(self, workload: Workload, batch: Batch) -> None:
        """Choose the size for `batch`; called before each batch is cut."""


@runtime_checkable
class ShrinkingSplit(Split, Protocol):
    """A split that knows how to make its micro-batches smaller when memory ran out."""

    def shrink(self, ran: MicroBatches) -> Split | None:
        """The split to use after `ran`, which did not fit: micro-batches of about half the size; None if there is none."""


@dataclass(frozen=True, slots=True)
class Rows:
    """At most `size` rows per micro-batch: ceil(rows / size) of them, near-equal, longer ones first.

    Tensors are cut into views: nothing is copied.

    >>> import torch
    >>> [len(part) for part in Rows(16).cut(torch.zeros(40, 2))]
    [14, 13, 13]
    """

    size: int

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, Integral) or self.size < 1:
            raise SplitError(
                f"Rows({self.size!r}): the micro-batch size must be a whole number of rows, 1 or more. Use Rows(1) for "
                "the least memory."
            )

    def cut(self, batch: Batch) -> MicroBatches:
        """The micro-batches of `batch`; 40 rows by 16 are 14, 13, 13."""
        count = num_rows(batch)
        if count <= self.size:
            return MicroBatches((batch,))
        return MicroBatches(split_rows(batch, near_equal(count, self.size)))

    def shrink(self, ran: MicroBatches) -> "Rows | None":
        """A split of half the rows: half of `size`, or half of the whole batch where that has fewer."""
        largest = min(self.size, sum(len(rows) for rows in ran.row_numbers))
        return Rows(largest // 2) if largest > 1 else None


def near_equal(count: int, size: int) -> list[int]:
    """The sizes of ceil(count / size) parts that differ by at most 1, longer ones first."""
    num_parts = -(-count // size)
    shortest, num_longer = divmod(count, num_parts)
    return [shortest + 1] * num_longer + [shortest] * (num_parts - num_longer)
