"""A batch already cut, and what cuts one: the protocols of splits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol, runtime_checkable

from anybatch.batches.batch import num_rows
from anybatch.batches.cost import Cut
from anybatch.batches.nesting import Batch
from anybatch.errors import BatchError
from anybatch.faces import one_line


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """A batch already cut: micro-batches in the order they run.

    `Accumulator` and `Update` take one as they take a batch. With `whole`, no micro-batch is ever cut further: where memory
    runs out, that is an error, not half of rows that belong together.
    """

    micro_batches: tuple[Batch, ...]
    cut: Cut | None
    """Which rows of the batch each micro-batch holds, and what they are padded to; None where rows are in their own order."""
    whole: bool
    """True where no micro-batch may be cut further."""
    together: int
    """How many rows belong together, at most: no micro-batch is cut below that."""

    def __init__(
        self,
        micro_batches: "tuple[Batch, ...] | list[Batch]",
        cut: Cut | None = None,
        *,
        whole: bool = False,
        together: int = 1,
    ) -> None:
        object.__setattr__(self, "micro_batches", tuple(micro_batches))
        object.__setattr__(self, "cut", cut)
        object.__setattr__(self, "whole", whole)
        object.__setattr__(self, "together", together)
        if not self.micro_batches:
            raise BatchError("MicroBatches() holds 0 micro-batches; give at least 1.")
        if cut is not None and len(cut.rows) != len(self.micro_batches):
            raise BatchError(
                f"MicroBatches() holds {len(self.micro_batches)} micro-batches, but its cut has {len(cut.rows)}; give one "
                "tuple of row numbers per micro-batch."
            )

    __repr__ = one_line

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
class SortingSplit(Split, Protocol):
    """A split that puts rows together by what they hold, such as their length."""

    def cut_in_arrival_order(self, batch: Batch, like: MicroBatches) -> MicroBatches:
        """As many rows as they came in each micro-batch, none of which needs more memory than the largest of `like`."""


def is_in_arrival_order(cut: MicroBatches) -> bool:
    """True where nobody has sorted the rows; those of a group may stand apart."""
    if cut.cut is None:
        return True
    order = [number for numbers in cut.cut.rows for number in (numbers if cut.together == 1 else numbers[:1])]
    return order == sorted(order)


def in_arrival_order(split: Split, batch: Batch, cut: MicroBatches) -> MicroBatches:
    """`cut`, which `split` made; cut anew where the split sorts rows."""
    is_new = isinstance(split, SortingSplit) and not isinstance(batch, MicroBatches) and cut.cut is not None
    return split.cut_in_arrival_order(batch, cut) if is_new else cut  # type: ignore[attr-defined]


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
    check: Any = "off"
    """What is looked at before the first batch is learnt from, as long as that is to be done."""


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
