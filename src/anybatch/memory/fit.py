"""`Fit`: the largest micro-batch that fits, by prediction; the fastest of those that do for "auto"."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import nn

from anybatch.batch_norm import batch_norms, uses_batch_statistics
from anybatch.core import (
    Batch,
    MicroBatches,
    Rows,
    Split,
    Workload,
    in_arrival_order,
    is_sharded,
    num_rows,
    smaller,
    tensors,
)
from anybatch.display import parse_bytes, show_bytes
from anybatch.errors import MemoryLimitError, SplitError, first_line, user_stacklevel
from anybatch.memory.planning import Plan, plan
from anybatch.ragged import Auto, Choice, Doubling, Tokens

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
        """Say in words what was chosen, and why."""
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
class _BatchShape:
    """Number of rows, and the dtype and shape of each tensor's row: all of a batch that decides its memory."""

    rows: int
    tensors: tuple[tuple[torch.dtype, tuple[int, ...]], ...]

    @property
    def row_elements(self) -> int:
        return sum(math.prod(sizes) for _, sizes in self.tensors)

    def covers(self, other: "_BatchShape") -> bool:
        """True if a batch of the other shape needs no more than one of this."""
        if other.rows > self.rows or len(other.tensors) != len(self.tensors):
            return False
        return all(
            dtype == own_dtype and len(sizes) == len(own) and all(a <= b for a, b in zip(sizes, own, strict=True))
            for (dtype, sizes), (own_dtype, own) in zip(other.tensors, self.tensors, strict=True)
        )


@dataclass(slots=True)
class _Fitting:
    """The split chosen for batches up to one shape."""

    shape: _BatchShape
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

    def wastes(self, shape: _BatchShape) -> bool:
        """True where rows as short as these could be so many more in a micro-batch that it is worth planning for them."""
        is_cut = isinstance(self.asked, Rows) and shape.rows > self.chosen and not self.reason
        return is_cut and shape.row_elements < WORTH_PLANNING * self.shape.row_elements


class Fit(Split):
    """The largest micro-batch whose update is predicted to fit into `memory`, less `margin` of it.

    Predicting takes seconds, once: it is repeated only for longer rows or more of them than any before, and for rows that are
    cut and shorter by 15 % or more. All micro-batches but the last are as large as fits, because equal ones would leave memory
    unused. Where an update cannot be predicted, rows double from batch to batch until memory runs out: `memory` is then
    not kept, and a warning says so; a sharded model is refused instead. `choice` says which way it went.

    Args:
        memory: All that the update may take, weights and optimizer included: "6GiB", or bytes. None: what the device has
            free when the first batch comes.
        most: Bounds the micro-batch too, and says how to cut: `Rows(n)`, or `Tokens(budget, ...)`. Without it, a batch with
            `attention_mask` is cut by tokens and any other by rows.
        fastest: Deprecated. True tries sizes up to what fits on real updates and keeps the fastest, as `"auto"` does.
        margin: Share of the memory to leave free. None: 5 %, and 15 % on the CPU, whose kernels keep memory of their own.
    """

    def __init__(
        self,
        memory: str | int | None = None,
        *,
        most: "int | Rows | Tokens | None" = None,
        fastest: bool | None = None,
        margin: float | None = None,
    ) -> None:
        if most is not None and (isinstance(most, bool) or not isinstance(most, (int, Rows, Tokens))):
            raise SplitError(
                f"Fit(most={most!r}): give the largest micro-batch allowed, as a number of rows, such as 64, or as "
                "Tokens(8192), or None."
            )
        if isinstance(most, Rows) and not most.is_plain:
            raise SplitError(
                f"Fit(most={most!r}): what fits is predicted for rows in dim 0, each by itself, collated. Give micro_batch="
                f"{most!r} itself: where memory runs out, it is halved and the batch starts again."
            )
        if margin is not None and not 0 <= margin < 1:
            raise SplitError(f"Fit(margin={margin!r}): expected a share of the memory to leave free, such as 0.05.")
        if fastest is not None:
            warnings.warn(
                f"Fit(fastest={fastest!r}) is deprecated, and checkpointing is no longer tried: plan() says what it would "
                'save. Sizes up to what fits are tried on real updates where fastest is True, as micro_batch="auto" does; '
                "leave fastest out for the largest that fits.",
                DeprecationWarning,
                stacklevel=user_stacklevel(),
            )
        self.memory = None if memory is None else parse_bytes(memory)
        self.most = Rows(most) if isinstance(most, int) else most
        self.fastest = bool(fastest)
        self.margin = margin
        self._fits: list[_Fitting] = []
        self._last: _Fitting | None = None

    def __repr__(self) -> str:
        given = [repr(show_bytes(self.memory))] if self.memory is not None else []
        given += [f"most={self.most!r}"] if self.most is not None else []
        return f"Fit({', '.join([*given, *(['fastest=True'] if self.fastest else [])])})"

    @property
    def choice(self) -> Fitted | None:
        """The choice for batches like the last one; None before the first."""
        last = self._last
        if last is None:
            return None
        split = last.split
        return Fitted(
            kind=last.kind,
            size=split.size if isinstance(split, Doubling) else last.size,
            plan=last.plan,
            reason=last.reason,
            fastest=split.choice if isinstance(split, Auto) else None,
            retries=last.retries,
        )

    @property
    def need(self) -> str | None:
        """Memory that an update with a single row was predicted to take, in words."""
        return None if self._last is None or self._last.plan is None else show_bytes(self._last.plan.least_bytes)

    def choose_for(self, workload: Workload, batch: Batch) -> None:
        """Choose for a batch like this one, unless that was done."""
        shape = _shape_of(batch, self.most)
        covering = [fitting for fitting in self._fits if fitting.shape.covers(shape)]
        found = min(covering, key=lambda fitting: (fitting.shape.row_elements, fitting.shape.rows), default=None)
        if found is None or found.wastes(shape):
            found = self._predict(workload, batch, shape)
            self._fits.append(found)
        self._last = found

    def cut(self, batch: Batch) -> MicroBatches:
        """The micro-batches of `batch`, none larger than what fits."""
        if self._last is None:
            raise SplitError(
                f"{self!r} chooses by the model and its optimizer, and has seen neither. Give it to Update or Accumulator as "
                "micro_batch."
            )
        return self._last.split.cut(batch)

    def cut_in_arrival_order(self, batch: Batch, like: MicroBatches) -> MicroBatches:
        """As the split inside does, which made `like`."""
        assert self._last is not None
        return in_arrival_order(self._last.split, batch, like)

    @property
    def reads_dim_0(self) -> bool:
        """True where dim 0 is taken for the rows, and nobody said that it is."""
        return self._last is not None and self._last.kind == "rows"

    @property
    def learn(self) -> Callable[[MicroBatches, Sequence[float | None]], None] | None:
        """The `learn` of the split inside; None where that has none, so that micro-batches are not timed."""
        return None if self._last is None else self._last.split.learn

    @property
    def sums(self) -> Literal["fp32", "param"]:
        """The dtype that gradients are summed in where `sums="auto"` leaves it to the plan."""
        return "fp32" if self._last is None or self._last.plan is None else self._last.plan.sums

    def shrink(self, ran: MicroBatches) -> "Fit | None":
        """Half of what did not fit, for batches like this one; None where that was a single row."""
        last = self._last
        assert last is not None
        shrunk = smaller(last.split, ran)
        if shrunk is None:
            return None
        last.split = shrunk
        last.retries += 1
        largest = max(map(len, ran.row_numbers)) if last.kind == "rows" or ran.cut is None else ran.cut.largest
        last.size = max(largest // 2, 1)
        return self

    @property
    def bound(self) -> int:
        """The largest micro-batch that batches like the last one may be cut to."""
        assert self._last is not None
        return self._last.size

    def resized(self, size: int) -> "Fit":
        """This split, with micro-batches of at most `size` for batches like the last one, and not more than was chosen."""
        last = self._last
        assert last is not None
        resized = last.split.resized
        last.size = min(size, last.chosen)
        is_asked = size >= last.chosen and last.split is not last.asked  # one that changes itself is told of the size
        last.split = last.asked if is_asked or resized is None else resized(size)
        return self

    def _tokens_for(self, batch: Batch) -> Tokens | None:
        if self.most is None and isinstance(batch, Mapping) and "attention_mask" in batch:
            return Tokens(1, slack=0)  # slack gives up time for memory, and here memory is what there is
        return self.most if isinstance(self.most, Tokens) else None

    def _predict(self, workload: Workload, batch: Batch, shape: _BatchShape) -> _Fitting:
        tokens = self._tokens_for(batch)
        try:
            found = plan(
                workload.model,
                workload.optimizer,
                workload.objective,
                batch,
                memory=self.memory,
                split=tokens,
                margin=self.margin,
                checkpointing=False,
                options=workload.options,
            )
        except Exception as error:  # an odd model is no reason not to train it
            return self._unpredicted(workload, shape, error)
        if not found.fits and self.memory is not None:
            raise MemoryLimitError(
                f"an update with a single row is predicted to need {show_bytes(found.least_bytes)}, and {self!r} allows "
                f"{show_bytes(found.limit)}: {show_bytes(found.memory)} less {found.margin:.0%}. Allow more, use shorter "
                "rows, an optimizer with less state, autocast=torch.bfloat16, or torch.utils.checkpoint inside the model."
            )
        most: Rows | Tokens
        if tokens is None:
            size = max(min(found.micro_batch, self.most.size if isinstance(self.most, Rows) else found.rows), 1)
            most = Rows(size) if self.fastest else Rows(size, tail=_least_tail(workload.model, size))
        else:  # where memory seems not to suffice for a row, a row is tried
            largest = tokens.budget if self.most is tokens else found.whole_size
            size = max(min(found.micro_batch, largest), found.whole_size // found.rows)
            most = tokens.with_budget(size)
        return _Fitting(shape, Auto(most=most) if self.fastest else most, found.unit, size, found)

    def _unpredicted(self, workload: Workload, shape: _BatchShape, error: Exception) -> _Fitting:
        """Keep the size of a smaller batch of such rows; without one, double the rows until memory runs out."""
        fewer = [one for one in self._fits if one.plan is not None and one.shape.covers(replace(shape, rows=1))]
        if fewer:
            last = fewer[-1]
            return _Fitting(shape, last.split, last.kind, last.size, last.plan, first_line(error))
        why = f"{self!r} cannot be kept: what an update takes could not be predicted ({first_line(error)})"
        if self.memory is not None and any(is_sharded(one) for one in workload.model.parameters()):
            raise MemoryLimitError(f"{why}. Give micro_batch=n, in rows; or Fit(), which doubles.") from error
        if self.memory is not None:
            warnings.warn(
                f"{why}. Rows double from batch to batch until memory runs out. Give micro_batch=n, in rows, to bound them.",
                stacklevel=user_stacklevel(),
            )
        most = self.most.size if isinstance(self.most, Rows) else None
        return _Fitting(shape, Doubling(most), "rows", 1, reason=first_line(error))


def fastest_fit(memory: str | int | None = None, *, most: "int | Rows | Tokens | None" = None) -> Fit:
    """The split that `"auto"` stands for: a search by rate (`Auto`) up to the largest micro-batch that fits."""
    fit = Fit(memory, most=most)
    fit.fastest = True
    return fit


def _shape_of(batch: Batch, most: Rows | Tokens | None) -> _BatchShape:
    if isinstance(most, Tokens) and most.collate is not None:
        lengths = most.measure(batch).lengths
        return _BatchShape(len(lengths), ((torch.long, (max(lengths),)),))
    return _BatchShape(num_rows(batch), tuple((tensor.dtype, tuple(tensor.shape[1:])) for tensor in tensors(batch)))


def _least_tail(model: nn.Module, size: int) -> int:
    """The fewest rows of a last micro-batch: a quarter of the others where it has statistics of its own, else 2."""
    return max(size // 4, 2) if any(map(uses_batch_statistics, batch_norms(model).values())) else 2
