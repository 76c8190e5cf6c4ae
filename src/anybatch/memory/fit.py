"""`Fit`: the largest micro-batch that is predicted to fit into memory, or the fastest up to it for "auto"."""

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

WORTH_PLANNING = 0.85  # rows shorter than this share of the planned rows get a plan of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The micro-batch that `Fit` chose, and why."""

    kind: Literal["rows", "tokens"]
    """Unit of `size`."""
    size: int
    """Largest micro-batch, in rows or in tokens with padding."""
    plan: Plan | None
    """The prediction; None if the update could not be predicted."""
    reason: str
    """Why the update could not be predicted."""
    fastest: Choice | None
    """The fastest size up to `size`, if it is searched for."""
    retries: int
    """Number of out-of-memory errors, after each of which the micro-batch was halved."""

    def describe(self) -> str:
        """Return the choice and its reason in words."""
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
    """Number of rows, and dtype and shape of each tensor's row: everything that the memory of a batch depends on."""

    rows: int
    tensors: tuple[tuple[torch.dtype, tuple[int, ...]], ...]

    @property
    def row_elements(self) -> int:
        return sum(math.prod(sizes) for _, sizes in self.tensors)

    def covers(self, other: "_BatchShape") -> bool:
        """Return True if a batch of the other shape needs no more memory."""
        if other.rows > self.rows or len(other.tensors) != len(self.tensors):
            return False
        return all(
            dtype == own_dtype and len(sizes) == len(own) and all(a <= b for a, b in zip(sizes, own, strict=True))
            for (dtype, sizes), (own_dtype, own) in zip(other.tensors, self.tensors, strict=True)
        )


@dataclass(slots=True)
class _Fitting:
    """The split for batches up to one shape."""

    shape: _BatchShape
    split: Split
    kind: Literal["rows", "tokens"]
    size: int
    plan: Plan | None = None
    reason: str = ""
    retries: int = 0
    planned_size: int = field(init=False)  # upper bound of `size`
    planned_split: Split = field(init=False)

    def __post_init__(self) -> None:
        self.planned_size, self.planned_split = self.size, self.split

    def is_worth_planning(self, shape: _BatchShape) -> bool:
        """Return True if many more rows of this shape would fit, so that they are worth a plan of their own."""
        is_cut = isinstance(self.planned_split, Rows) and shape.rows > self.planned_size and not self.reason
        return is_cut and shape.row_elements < WORTH_PLANNING * self.shape.row_elements


class Fit(Split):
    """A split into the largest micro-batches that are predicted to fit into `memory`, less `margin`.

    The prediction takes seconds for the first batch. It is repeated only for longer or more rows than before, and for rows
    that are 15 % shorter or more. All micro-batches but the last have the full size. If an update cannot be predicted, the
    micro-batch doubles from batch to batch until memory runs out: `memory` is then not kept, and a warning says so; a sharded
    model is refused instead. `choice` has the size and its reason.

    Args:
        memory: Memory of the whole update, weights and optimizer included: "6GiB", or bytes. None: what the device has free
            at the first batch.
        most: Upper bound of the micro-batch, and its unit: `Rows(n)`, n, or `Tokens(budget, ...)`. None: tokens for a batch
            with `attention_mask`, else rows.
        fastest: Deprecated. True tries sizes up to the largest on real updates and keeps the fastest, like `"auto"`.
        margin: Share of the memory to leave free. None: 5 %, and 15 % on the CPU, where kernels keep memory of their own.

    Raises:
        SplitError: If `most` or `margin` cannot be used.
        MemoryLimitError: At a batch, if not even one row is predicted to fit.

    >>> import torch
    >>> from anybatch import Fit, Update, supervised
    >>> model = torch.nn.Linear(8, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> update = Update(model, optimizer, supervised(torch.nn.CrossEntropyLoss()), micro_batch=Fit("64MiB"))
    >>> update((torch.randn(32, 8), torch.zeros(32).long())).micro_batches
    1
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
        """Choice for batches like the last one; None before the first."""
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
        """Predicted memory of an update with micro-batches of one row, in words."""
        return None if self._last is None or self._last.plan is None else show_bytes(self._last.plan.least_bytes)

    def choose_for(self, workload: Workload, batch: Batch) -> None:
        """Plan for batches of this shape, unless an earlier plan covers it.

        Args:
            workload: Model, optimizer, objective and options of the update.
            batch: The batch to plan for.

        Raises:
            MemoryLimitError: If not even one row is predicted to fit.
        """
        shape = _shape_of(batch, self.most)
        covering = [fitting for fitting in self._fits if fitting.shape.covers(shape)]
        found = min(covering, key=lambda fitting: (fitting.shape.row_elements, fitting.shape.rows), default=None)
        if found is None or found.is_worth_planning(shape):
            found = self._predict(workload, batch, shape)
            self._fits.append(found)
        self._last = found

    def cut(self, batch: Batch) -> MicroBatches:
        """Split a batch into micro-batches of the chosen size.

        Args:
            batch: A batch like the last one given to `choose_for`.

        Returns:
            The micro-batches.

        Raises:
            SplitError: If `choose_for` was not called before.
        """
        if self._last is None:
            raise SplitError(
                f"{self!r} chooses by the model and its optimizer, and has seen neither. Give it to Update or Accumulator as "
                "micro_batch."
            )
        return self._last.split.cut(batch)

    def cut_in_arrival_order(self, batch: Batch, like: MicroBatches) -> MicroBatches:
        """Split a batch in the order of its rows.

        Args:
            batch: The batch.
            like: Micro-batches of the chosen split, an upper bound for those returned.

        Returns:
            The micro-batches.
        """
        assert self._last is not None
        return in_arrival_order(self._last.split, batch, like)

    @property
    def reads_dim_0(self) -> bool:
        """True if rows are assumed to lie in dim 0."""
        return self._last is not None and self._last.kind == "rows"

    @property
    def learn(self) -> Callable[[MicroBatches, Sequence[float | None]], None] | None:
        """The `learn` of the chosen split; None if micro-batches need not be timed."""
        return None if self._last is None else self._last.split.learn

    @property
    def sums(self) -> Literal["fp32", "param"]:
        """Planned dtype of gradient sums, for `sums="auto"`."""
        return "fp32" if self._last is None or self._last.plan is None else self._last.plan.sums

    def shrink(self, ran: MicroBatches) -> "Fit | None":
        """Halve the micro-batch for batches like the last one.

        Args:
            ran: The micro-batches that ran out of memory.

        Returns:
            This split, or None if a micro-batch was a single row.
        """
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
        """Largest micro-batch for batches like the last one."""
        assert self._last is not None
        return self._last.size

    def resized(self, size: int) -> "Fit":
        """Bound the micro-batch of batches like the last one.

        Args:
            size: Rows or tokens; the planned size remains an upper bound.

        Returns:
            This split.
        """
        last = self._last
        assert last is not None
        resized = last.split.resized
        last.size = min(size, last.planned_size)
        # a split that searches resizes itself
        is_planned = size >= last.planned_size and last.split is not last.planned_split
        last.split = last.planned_split if is_planned or resized is None else resized(size)
        return self

    def _predict(self, workload: Workload, batch: Batch, shape: _BatchShape) -> _Fitting:
        tokens = self.most if isinstance(self.most, Tokens) else None
        if self.most is None and isinstance(batch, Mapping) and "attention_mask" in batch:
            tokens = Tokens(1, slack=0)  # slack would trade memory for time
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
        except Exception as error:  # a model that cannot be predicted can still be trained
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
        else:  # if not even one row is predicted to fit, one row is tried
            largest = tokens.budget if self.most is tokens else found.whole_size
            size = max(min(found.micro_batch, largest), found.whole_size // found.rows)
            most = tokens.with_budget(size)
        return _Fitting(shape, Auto(most=most) if self.fastest else most, found.unit, size, found)

    def _unpredicted(self, workload: Workload, shape: _BatchShape, error: Exception) -> _Fitting:
        """Keep the size of a smaller batch of such rows, or double the rows until memory runs out."""
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
    """Return the split of `micro_batch="auto"`: the fastest size up to the largest that fits."""
    fit = Fit(memory, most=most)
    fit.fastest = True
    return fit


def _shape_of(batch: Batch, most: Rows | Tokens | None) -> _BatchShape:
    if isinstance(most, Tokens) and most.collate is not None:
        lengths = most.measure(batch).lengths
        return _BatchShape(len(lengths), ((torch.long, (max(lengths),)),))
    return _BatchShape(num_rows(batch), tuple((tensor.dtype, tuple(tensor.shape[1:])) for tensor in tensors(batch)))


def _least_tail(model: nn.Module, size: int) -> int:
    """Return the fewest rows of the last micro-batch: a quarter of the others if it has batch statistics, else 2."""
    return max(size // 4, 2) if any(map(uses_batch_statistics, batch_norms(model).values())) else 2
