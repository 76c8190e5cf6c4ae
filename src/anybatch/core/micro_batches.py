"""Micro-batches, and the base class of the splits that make them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from anybatch.core.batch import num_rows
from anybatch.core.display import one_line
from anybatch.core.nesting import Batch, map_tensors
from anybatch.errors import BatchError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The micro-batches of one batch, in the order they run: longest first, so that what does not fit fails at once."""

    rows: tuple[tuple[int, ...], ...]
    """Row numbers of each micro-batch, ascending; together every row of the batch, once."""
    lengths: tuple[int, ...]
    """Longest row of each micro-batch: what it is padded to."""

    @property
    def padded_tokens(self) -> int:
        """Tokens of all micro-batches, padding included."""
        return sum(len(rows) * length for rows, length in zip(self.rows, self.lengths, strict=True))

    @property
    def largest(self) -> int:
        """Tokens of the largest micro-batch, padding included."""
        return max(len(rows) * length for rows, length in zip(self.rows, self.lengths, strict=True))

    def cost(self, cost: Any) -> Any:
        """What all micro-batches cost together."""
        return sum(cost.of(len(rows), length) for rows, length in zip(self.rows, self.lengths, strict=True))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What runs on the micro-batches: all that the memory of an update depends on. The values are those of `Update`."""

    model: Any
    objective: Any
    optimizer: Any = None
    """None where the caller steps the optimizer."""
    running: Any = None
    """Its options, as one value."""


Learn = Callable[[MicroBatches, Sequence[float | None]], None]
"""Called when the batch that was cut last has run, with seconds per micro-batch; None stands for one that was left out."""
ChooseFor = Callable[[Workload, Batch], None]


@runtime_checkable
class CutsBatches(Protocol):
    """Anything that cuts batches: a `Split`, or a class of the user's own that has `cut`."""

    def cut(self, batch: Batch) -> MicroBatches:
        """The micro-batches of `batch`, in the order they run."""


class Split:
    """A policy that cuts a batch; every row lands in exactly one micro-batch.

    A split of your own derives from it and has `cut`. All else has a default, and may be overridden.
    """

    __slots__ = ()

    collate: Callable[[list[Any]], Batch] | None = None
    """Collates the samples of a micro-batch, where batches are lists of raw samples."""
    groups: Any = None
    """Which rows belong together."""
    batch_dim: int | None = None
    """The dim that is the rows, where somebody said so."""

    def cut(self, batch: Batch) -> MicroBatches:
        """The micro-batches of `batch`, in the order they run."""
        raise NotImplementedError(f"{type(self).__name__} has no cut(batch), which returns MicroBatches.")

    def cut_in_arrival_order(self, batch: Batch, like: MicroBatches) -> MicroBatches:
        """As many rows as they came in each micro-batch, none larger than the largest of `like`; for splits that sort rows."""
        return like

    def shrink(self, ran: MicroBatches) -> "Split | None":
        """The split to use after `ran`, which did not fit: micro-batches of about half the size; None if there is none."""
        return None

    @property
    def choose_for(self) -> ChooseFor | None:
        """Called with the workload before each batch is cut, by a split that chooses its size by it."""
        return None

    @property
    def learn(self) -> Learn | None:
        """Called with the times of micro-batches; None where nobody need time them."""
        return None

    @property
    def resized(self) -> "Callable[[int], Split] | None":
        """The same split with micro-batches of at most so much; None of a split that knows no sizes."""
        return None

    @property
    def bound(self) -> int:
        """The largest micro-batch that batches like the last one may be cut to; 0 if the split does not say."""
        return 0

    @property
    def need(self) -> str | None:
        """Memory that an update with a single row was predicted to take, in words."""
        return None

    @property
    def reads_dim_0(self) -> bool:
        """True where dim 0 is taken for the rows, and nobody said that it is."""
        return False

    @property
    def sums(self) -> str:
        """The dtype that gradients are summed in under `sums="auto"`: "fp32" or "param"."""
        return "fp32"


class OwnSplit(Split):
    """A split of the user's own that does not derive from `Split`: its own attributes, and the defaults for the rest."""

    def __init__(self, own: CutsBatches) -> None:
        self.own = own

    def __repr__(self) -> str:
        return repr(self.own)

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__").get("own")
        if name.startswith("__") or name in ("own", "shrink", "resized") or not hasattr(own, name):
            return object.__getattribute__(self, name)
        return getattr(own, name)

    def shrink(self, ran: MicroBatches) -> Split | None:
        found = self.own.shrink(ran) if hasattr(self.own, "shrink") else None
        return None if found is None else self._same_or_derived(found)

    @property
    def resized(self) -> Callable[[int], Split] | None:
        own = getattr(self.own, "resized", None)
        return None if own is None else lambda size: self._same_or_derived(own(size))

    def _same_or_derived(self, found: CutsBatches) -> Split:
        return self if found is self.own else derived(found)


def derived(split: CutsBatches) -> Split:
    """The split itself if it derives from `Split`, else wrapped so that it has all that a split may do."""
    return split if isinstance(split, Split) else OwnSplit(split)


def is_in_arrival_order(cut: MicroBatches) -> bool:
    """True where nobody has sorted the rows; those of a group may stand apart."""
    if cut.cut is None:
        return True
    order = [number for numbers in cut.cut.rows for number in (numbers if cut.together == 1 else numbers[:1])]
    return order == sorted(order)


def in_arrival_order(split: CutsBatches, batch: Batch, cut: MicroBatches) -> MicroBatches:
    """`cut`, which `split` made; cut anew where the split sorts rows."""
    is_final = isinstance(batch, MicroBatches) or cut.cut is None
    return cut if is_final else derived(split).cut_in_arrival_order(batch, cut)


@dataclass(frozen=True, slots=True)
class Dealt:
    """One rank's part of a batch that several ranks share.

    `Accumulator` and `Update` take one as they take a batch. A rank that was dealt no row has `row_numbers == ()` and a
    `batch` of one stand-in row, the first of the whole batch: it takes part in forward, backward and every synchronisation,
    and counts for nothing.
    """

    batch: Batch
    """This rank's rows, collated; or the stand-in."""
    row_numbers: tuple[int, ...]
    """Which rows of the whole batch these are, in the order of `batch`."""
    num_rows: int
    """Rows of the whole batch, over all ranks."""

    __repr__ = one_line

    @property
    def is_stand_in(self) -> bool:
        """True where this rank was dealt no row."""
        return not self.row_numbers

    def pin_memory(self) -> "Dealt":
        """With every tensor in pinned memory; what a loader with `pin_memory=True` calls."""
        return replace(self, batch=map_tensors(self.batch, Tensor.pin_memory))
