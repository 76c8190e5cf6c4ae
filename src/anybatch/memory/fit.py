"""`Fit`: the largest micro-batch that fits, by prediction; the fastest of those that do, if asked for."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Literal

from torch import Tensor

from anybatch.batches import (
    Auto,
    Batch,
    Doubling,
    MicroBatches,
    Rows,
    Split,
    Tokens,
    Workload,
    in_arrival_order,
    smaller,
    tensors,
)
from anybatch.errors import MemoryLimitError, SplitError, first_line, levels_to_the_caller
from anybatch.memory.batch_shape import BatchShape, shape_of
from anybatch.memory.fitted import Fitted
from anybatch.memory.fitting import Fitting, fitting_within
from anybatch.memory.measured_rows import MeasuredRows
from anybatch.memory.planning import MARGIN, plan
from anybatch.memory.predicting import for_more_rows, micro_batch_source_of
from anybatch.memory.ranking import WayContest, fastest_own_way, may_recompute
from anybatch.memory.tracing import KeptMemory, learning_tensors
from anybatch.sizes import parse_bytes, show_bytes
from anybatch.torch_inside import is_sharded


class Fit(Split):
    """The largest micro-batch whose update is predicted to fit into `memory`, less `margin` of it.

    `memory` is all that the update may take, weights and optimizer included: "6GiB", or bytes; None: what the device has
    free when the first batch comes. `most` also bounds the micro-batch, and says how to cut: `Rows(n)`, or
    `Tokens(budget, ...)`; without it, a batch with `attention_mask` is cut by tokens and any other by rows. With `fastest`,
    sizes within what fits are tried on real updates and the fastest is kept; "auto" stands for `Fit(fastest=True)`. Where the
    batch has to be cut and measured passes say that checkpointing with larger micro-batches is faster, it is tried on real
    updates too, and stays if it is: on while a batch runs, and off between batches. Without it, all micro-batches but the last
    are as large as fits, because equal ones would leave memory unused.

    Predicting takes seconds, once: it is repeated only for longer rows than any before, for rows that are cut and shorter by
    15 % or more, or for more of them where fewer fitted whole. What kernels of the CPU keep for each shape that they meet is
    measured, and taken off what rows may have. Where
    an update cannot be predicted, rows double from batch to batch: below `memory`, measured while they run, or where that is
    None, until memory runs out. What cannot be measured either, because it is sharded, is refused with a `memory`. `choice`
    says which way it went.
    """

    def __init__(
        self,
        memory: str | int | None = None,
        *,
        most: "int | Rows | Tokens | None" = None,
        fastest: bool = False,
        margin: float = MARGIN,
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
        if not 0 <= margin < 1:
            raise SplitError(f"Fit(margin={margin!r}): expected a share of the memory to leave free, such as 0.05.")
        self.memory = None if memory is None else parse_bytes(memory)
        self.most = Rows(most) if isinstance(most, int) else most
        self.fastest = fastest
        self.margin = margin
        self._fits: list[Fitting] = []
        self._last: Fitting | None = None
        self._kept = KeptMemory()
        self._has_run = self._has_warned = False

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
        own = split.size if isinstance(split, Doubling | MeasuredRows) else last.size
        return Fitted(
            kind=last.kind,
            size=split.most if isinstance(split, WayContest) else own,
            measured=split.peak if isinstance(split, MeasuredRows) else 0,
            plan=last.plan,
            reason=last.reason,
            fastest=split.choice if isinstance(split, Auto | WayContest) else None,
            way=split.way if isinstance(split, WayContest) else None,
            retries=last.retries,
        )

    @property
    def need(self) -> str | None:
        """What an update with a single row was predicted to take."""
        return None if self._last is None or self._last.plan is None else show_bytes(self._last.plan.least_bytes)

    def choose_for(self, workload: Workload, batch: Batch) -> None:
        """Choose for a batch like this one, unless that was done; less where what earlier ones left needs the room."""
        shape = shape_of(batch, self.most)
        covering = [fitting for fitting in self._fits if fitting.shape.covers(shape)]
        found = min(covering, key=lambda fitting: (fitting.shape.row_elements, fitting.shape.rows), default=None)
        if found is None or found.wastes(shape):
            found = self._as_with_fewer_rows(batch, shape) or self._predict(workload, batch, shape)
            self._fits.append(found)
        self._last = found
        if found.make_room(self._kept.next_time) and not self._has_warned and found.keeps_much(self._kept.bytes):
            self._has_warned = True
            warnings.warn(f"{self!r}: {found.said_of(self._kept.bytes)}", stacklevel=levels_to_the_caller())
        if found.plan is not None:
            self._begin(workload, batch)

    def batch_ran(self, ran: MicroBatches | None) -> None:
        """The batch that was cut last has run, in these micro-batches; None where memory ran out in it."""
        last = self._last
        if last is None or last.plan is None:
            return
        # the first update after a plan on fake tensors loads what stays for the whole process, and does not count
        if ran is not None and (self._has_run or last.plan.method == "real steps"):
            self._kept.look(tensors(list(ran)))
        self._kept.end()
        self._has_run = True

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

    def news(self) -> list[str]:
        """What has changed in how batches run since this was asked last, in words."""
        return self._last.split.news() if self._last is not None and isinstance(self._last.split, WayContest) else []

    @property
    def watching(self) -> Callable[[], AbstractContextManager[object]] | None:
        """The `watching` of the split inside; None where that has none, so that nothing is measured."""
        return None if self._last is None else getattr(self._last.split, "watching", None)

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

    def _as_with_fewer_rows(self, batch: Batch, shape: BatchShape) -> Fitting | None:
        """As for a batch of fewer such rows that had to be cut; None where there was none, or ways have to be ranked anew."""
        alike = [] if self.fastest else [one for one in self._fits if one.shape.covers(replace(shape, rows=1))]
        for known in sorted(alike, key=lambda one: one.shape.row_elements):
            if known.plan is None or known.wastes(shape):
                continue
            source = micro_batch_source_of(batch, self._tokens_for(batch))
            found = for_more_rows(known.plan, shape.rows, source.nbytes)
            if found is not None:
                return known.with_more_rows(found)
        return None

    def _tokens_for(self, batch: Batch) -> Tokens | None:
        is_masked = isinstance(batch, Mapping) and "attention_mask" in batch
        # slack gives up time for memory, and here memory is what there is
        own = Tokens(1, slack=0) if self.most is None and is_masked else None
        return self.most if isinstance(self.most, Tokens) else own

    def _predict(self, workload: Workload, batch: Batch, shape: BatchShape) -> Fitting:
        tokens = self._tokens_for(batch)
        is_first = not self._fits
        self._begin(workload, batch)
        try:
            found = plan(
                workload.model,
                workload.optimizer,
                workload.objective,
                batch,
                memory=None if self.memory is None else self._kept.left_of(self.memory),
                split=tokens,
                margin=self.margin,
                checkpointing=False,
                ranking=self.fastest and may_recompute(workload.model),
                running=workload.running,
                check=workload.check,
            )
        except (
            Exception
        ) as error:  # an odd model is no reason not to train it, unless that would break a word that was given
            if known := [
                one for one in self._fits if one.plan is not None and one.shape.covers(replace(shape, rows=1))
            ]:
                last = known[-1]  # of fewer rows: as many of them in a micro-batch fitted
                return Fitting(shape, last.split, last.kind, last.size, last.plan, first_line(error))
            if self.memory is not None and any(is_sharded(one) for one in workload.model.parameters()):
                raise MemoryLimitError(
                    f"{self!r} cannot be kept: what an update takes could not be predicted ({first_line(error)}), nor is it "
                    "measured where ranks hold parts of a model. Give micro_batch=n, in rows; or Fit(), which doubles."
                ) from error
            most = self.most.size if isinstance(self.most, Rows) else None
            return Fitting(shape, self._growing(workload, most), "rows", 1, reason=first_line(error))
        found = found if self.memory is None else replace(found, memory=self.memory)
        is_too_much = not found.fits and found.least_bytes > found.limit  # beside what is kept a row may still be tried
        if is_too_much and fastest_own_way(found) is None and self.memory is not None:
            less = "check='first', " if workload.check == "full" else ""
            raise MemoryLimitError(
                f"an update with a single row is predicted to need {show_bytes(found.least_bytes)}, and {self!r} allows "
                f"{show_bytes(found.limit)}: {show_bytes(found.memory)} less {found.margin:.0%}. Allow more, use {less}shorter "
                "rows, an optimizer with less state, autocast=torch.bfloat16, or torch.utils.checkpoint inside the model."
            )
        if is_first:  # which loads what stays for the whole process: trials know what was left beside that
            self._kept.expect(found.kept, 0)
        else:
            self._kept.look()
        self._kept.expect(0, 2 * found.kept_per_size)  # the full shape, and that of the tail
        return fitting_within(found, workload, shape, most=self.most, tokens=tokens, is_fastest=self.fastest)

    def _begin(self, workload: Workload, batch: Batch) -> None:
        """Count what is kept from now on, where that lies in the memory of the model."""
        if all(one.device.type == "cpu" for one in workload.model.parameters()):
            self._kept.begin(_learning(workload), tensors(batch))

    def _growing(self, workload: Workload, most: int | None) -> Split:
        """Rows that grow from batch to batch: measured while they run, where there is a limit to stay below."""
        if self.memory is None:
            return Doubling(most)
        return MeasuredRows(int(self.memory * (1 - self.margin)), _learning(workload), most)


def _learning(workload: Workload) -> Callable[[], list[Tensor]]:
    return lambda: learning_tensors(workload.model, workload.optimizer)  # no partial, whose copy would copy the model
