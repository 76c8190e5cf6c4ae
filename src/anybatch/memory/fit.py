"""`Fit`: the largest micro-batch that fits, by prediction; the fastest of those that do for "auto"."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from anybatch.core import Batch, MicroBatches, Rows, Split, Workload, in_arrival_order, is_sharded, smaller
from anybatch.display import parse_bytes, show_bytes
from anybatch.errors import MemoryLimitError, SplitError, first_line, levels_to_the_caller
from anybatch.memory.fitting import BatchShape, Fitted, Fitting, fitting_within, shape_of
from anybatch.memory.planning import plan
from anybatch.ragged import Auto, Doubling, Tokens


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
                stacklevel=levels_to_the_caller(),
            )
        self.memory = None if memory is None else parse_bytes(memory)
        self.most = Rows(most) if isinstance(most, int) else most
        self.fastest = bool(fastest)
        self.margin = margin
        self._fits: list[Fitting] = []
        self._last: Fitting | None = None

    def __repr__(self) -> str:
        given = [repr(show_bytes(self.memory))] if self.memory is not None else []
        given += [f"most={self.most!r}"] if self.most is not None else []
        return f"Fit({', '.join([*given, *(['fastest=True'] if self.fastest else [])])})"

    @property
    def choice(self) -> Fitted | None:
        """What is chosen for batches like the last one; None before the first."""
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
        """What an update with a single row was predicted to take."""
        return None if self._last is None or self._last.plan is None else show_bytes(self._last.plan.least_bytes)

    def choose_for(self, workload: Workload, batch: Batch) -> None:
        """Choose for a batch like this one, unless that was done."""
        shape = shape_of(batch, self.most)
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
        return None if self._last is None else getattr(self._last.split, "learn", None)

    @property
    def sums(self) -> Literal["fp32", "param"]:
        """What gradients are summed in where `sums="auto"` leaves it to the plan."""
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
        largest = (
            max(len(rows) for rows in ran.row_numbers) if last.kind == "rows" or ran.cut is None else ran.cut.largest
        )
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
        resized = getattr(last.split, "resized", None)
        last.size = min(size, last.chosen)
        is_asked = size >= last.chosen and last.split is not last.asked  # one that changes itself is told of the size
        last.split = last.asked if is_asked or resized is None else resized(size)
        return self

    def _tokens_for(self, batch: Batch) -> Tokens | None:
        is_masked = isinstance(batch, Mapping) and "attention_mask" in batch
        # slack gives up time for memory, and here memory is what there is
        own = Tokens(1, slack=0) if self.most is None and is_masked else None
        return self.most if isinstance(self.most, Tokens) else own

    def _predict(self, workload: Workload, batch: Batch, shape: BatchShape) -> Fitting:
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
                running=workload.running,
            )
        except Exception as error:  # an odd model is no reason not to train it
            return self._unpredicted(workload, shape, error)
        if not found.fits and self.memory is not None:
            raise MemoryLimitError(
                f"an update with a single row is predicted to need {show_bytes(found.least_bytes)}, and {self!r} allows "
                f"{show_bytes(found.limit)}: {show_bytes(found.memory)} less {found.margin:.0%}. Allow more, use shorter "
                "rows, an optimizer with less state, autocast=torch.bfloat16, or torch.utils.checkpoint inside the model."
            )
        return fitting_within(found, workload.model, shape, most=self.most, tokens=tokens, is_fastest=self.fastest)

    def _unpredicted(self, workload: Workload, shape: BatchShape, error: Exception) -> Fitting:
        """As many rows as fitted in a smaller batch of such rows; else rows that double until memory runs out."""
        fewer = [one for one in self._fits if one.plan is not None and one.shape.covers(replace(shape, rows=1))]
        if fewer:
            last = fewer[-1]
            return Fitting(shape, last.split, last.kind, last.size, last.plan, first_line(error))
        why = f"{self!r} cannot be kept: what an update takes could not be predicted ({first_line(error)})"
        if self.memory is not None and any(is_sharded(one) for one in workload.model.parameters()):
            raise MemoryLimitError(f"{why}. Give micro_batch=n, in rows; or Fit(), which doubles.") from error
        if self.memory is not None:
            warnings.warn(
                f"{why}. Rows double from batch to batch until memory runs out. Give micro_batch=n, in rows, to bound them.",
                stacklevel=levels_to_the_caller(),
            )
        most = self.most.size if isinstance(self.most, Rows) else None
        return Fitting(shape, Doubling(most), "rows", 1, reason=first_line(error))


def fastest_fit(memory: str | int | None = None, *, most: "int | Rows | Tokens | None" = None) -> Fit:
    """The split that `"auto"` stands for: a search by rate (`Auto`) up to the largest micro-batch that fits."""
    fit = Fit(memory, most=most)
    fit.fastest = True
    return fit
