"""Records that `Fit` keeps: the shape of a batch, the split chosen for it, and the choice as users see it."""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from anybatch.batch_norm import uses_batch_statistics
from anybatch.core import Batch, BatchNormLayer, Rows, Split, num_rows, tensors
from anybatch.display import show_bytes
from anybatch.memory.memory_plan import Plan
from anybatch.ragged import Auto, Choice, Tokens

WORTH_PLANNING = 0.85
"""Rows shorter than this share of those that were planned for have a plan of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The micro-batch that fits, and how that is known."""

    kind: Literal["rows", "tokens"]
    """The unit of `size`."""
    size: int
    """At most this many rows, or tokens with padding, per micro-batch."""
    plan: Plan | None
    """The prediction; None where there could be none."""
    reason: str
    """Why there could be no prediction."""
    fastest: Choice | None
    """The fastest size up to `size`, where it is searched for."""
    retries: int
    """How often memory ran out all the same, and the micro-batch was halved."""

    def describe(self) -> str:
        """In words: what was chosen, and why."""
        size = f"{self.size} {self.kind} per micro-batch"
        if self.plan is None:
            text = f"{size}, found by doubling until memory ran out, because it could not be predicted: {self.reason}"
        else:
            peak = self.plan.peak_bytes if self.size == self.plan.micro_batch else self.plan.peak(self.size)
            room = f"{show_bytes(self.plan.memory)} less {self.plan.margin:.0%}"
            text = f"{size} at most, predicted to need {show_bytes(peak)} of {room} ({self.plan.method})"
        if self.retries:
            text += f"; memory ran out {self.retries} times all the same"
        return f"{text}. " + self.fastest.describe() if self.fastest is not None else f"{text}."


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Number of rows, and the dtype and shape of each tensor's row: all of a batch that decides its memory."""

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


@dataclass(slots=True)
class Fitting:
    """The split chosen for batches up to one shape."""

    shape: BatchShape
    split: Split
    kind: Literal["rows", "tokens"]
    size: int
    plan: Plan | None = None
    reason: str = ""
    retries: int = 0
    chosen: int = field(init=False)
    """Upper bound of `size`; `asked` is the split for it."""
    asked: Split = field(init=False)

    def __post_init__(self) -> None:
        self.chosen, self.asked = self.size, self.split

    def wastes(self, shape: BatchShape) -> bool:
        """True where rows as short as these could be so many more in a micro-batch that it is worth planning for them."""
        is_cut = isinstance(self.asked, Rows) and shape.rows > self.chosen and not self.reason
        return is_cut and shape.row_elements < WORTH_PLANNING * self.shape.row_elements


def fitting_within(
    found: Plan,
    model: nn.Module,
    shape: BatchShape,
    *,
    most: Rows | Tokens | None,
    tokens: Tokens | None,
    is_fastest: bool,
) -> Fitting:
    """The split for what was predicted, at most `most`; where memory seems not to suffice for a row, a row is tried."""
    split: Rows | Tokens
    if tokens is None:
        size = max(min(found.micro_batch, most.size if isinstance(most, Rows) else found.rows), 1)
        split = Rows(size) if is_fastest else Rows(size, tail=_least_tail(model, size))
    else:
        largest = tokens.budget if most is tokens else found.whole_size
        size = max(min(found.micro_batch, largest), found.whole_size // found.rows)
        split = tokens.with_budget(size)
    chosen = Auto(most=split) if is_fastest else split
    return Fitting(shape, chosen, "rows" if tokens is None else "tokens", size, found)


def _least_tail(model: nn.Module, size: int) -> int:
    """The fewest rows of a last micro-batch: a quarter of the others where it has statistics of its own, else 2."""
    norms = [one for one in model.modules() if isinstance(one, BatchNormLayer) and uses_batch_statistics(one)]
    return max(size // 4, 2) if norms else 2
