"""Runs a plan: leaves its gradient in `.grad`, and returns the loss, units and metrics of the whole batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from anybatch.core.batch import Batch, map_tensors, move, tensor_on, tensors
from anybatch.core.events import SILENT, Accumulate, Backward, Events, Load
from anybatch.core.gradients import GradientSum, shares_of, weighted_sum
from anybatch.core.hooks import NOTHING, PassHook, around
from anybatch.core.metrics import Metrics, PerRow, by_itself, combine, detached, on_host
from anybatch.core.objective import PartLoss, loss_and_metrics, part_loss
from anybatch.core.out_of_memory import is_out_of_memory
from anybatch.core.parallelism import Needs, Parallelism, Ranks, Sync
from anybatch.core.plan import BatchPlan, Layout, Pass
from anybatch.core.snapshot import BatchState, MovingBuffers, Snapshot, WriteWatch, of_statistics
from anybatch.core.splits import Cut, MicroBatches
from anybatch.core.torch_private import number_in
from anybatch.display import facts_table, html_block, one_line
from anybatch.errors import MemoryLimitError, ParallelError, first_line


class Ahead:
    """Prefetching: the next micro-batch is copied on a side stream while one runs. Two are in memory at a time."""

    def __init__(self, plan: BatchPlan, device: torch.device) -> None:
        self._cut = plan.cut
        self._following = dict(pairwise(plan.micro_batches))
        self._stream = _side_stream(device)
        self._coming: dict[int, Batch] = {}

    def bring(self, micro_batch: Batch, index: int, device: torch.device) -> Batch:
        there = self._coming.pop(index, None)
        if there is None:
            there = move(micro_batch, device)
        else:
            now = torch.accelerator.current_stream(device)
            now.wait_stream(self._stream)
            for tensor in tensors(there):
                tensor.record_stream(now)  # the side stream owns its memory, and must not reuse it earlier
        following = self._following.get(index)
        if following is not None and all(tensor.is_pinned() for tensor in tensors(self._cut[following])):
            with self._stream:
                self._coming = {following: move(self._cut[following], device)}
        return there


@cache
def _side_stream(device: torch.device) -> torch.Stream:
    """Return one stream per device, because torch's allocator does not share memory between streams."""
    return torch.Stream(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPass:
    """The only caller of the model: moves a micro-batch to the device and computes a loss, or representations."""

    model: nn.Module
    compute: Callable[[nn.Module, Batch], Any]
    device: torch.device | None = None
    """Device to move micro-batches to; None if they are there, or parameters are on several devices."""
    ahead: Ahead | None = None
    autocast: AbstractContextManager[object] = NOTHING
    hooks: tuple[PassHook, ...] = ()
    events: Events = SILENT

    def __call__(self, micro_batch: Batch, index: int = 0) -> Any:
        """Compute on this micro-batch, which is number `index` of its batch."""
        if self.events is SILENT and self.device is None and self.autocast is NOTHING and not self.hooks:
            return self.compute(self.model, micro_batch)
        there = self.load(micro_batch, index)
        blocks = around([hook.around_forward(index) for hook in self.hooks])
        with self.events.forward(self.model, index), self.autocast, blocks:
            return self.compute(self.model, there)

    def load(self, micro_batch: Batch, index: int = 0) -> Batch:
        """Move the micro-batch to the model's device."""
        self.events.begin(Load)
        there = micro_batch
        if self.device is not None:
            there = move(there, self.device) if self.ahead is None else self.ahead.bring(there, index, self.device)
        self.events.end(Load, micro_batch=index, batch=there)
        return there


def is_there(micro_batch: Batch, device: torch.device | None) -> bool:
    """Return True if the micro-batch need not be moved; `device` is None if there is no single one."""
    return device is None or all(tensor.device == device for tensor in tensors(micro_batch))


@dataclass(slots=True)
class Barrier:
    """Barrier before anything that cannot be undone: all ranks reach it, or all raise.

    A rank that failed calls `fail` instead of `hold`. Out of memory on one rank is out of memory on all, so that all start
    again. After the final barrier the others already wait in a collective, and a retry would pair with the wrong one. So a
    rank fails alone there, and out of memory is an error. One process needs no barrier; ranks whose passes are
    collectives need none either.
    """

    ranks: Ranks
    is_over: bool
    is_known: bool = False
    """True if every rank knows that one failed."""

    def hold(self, *, is_final: bool = False) -> None:
        """Wait for all ranks; raise if one has failed."""
        if not self.is_over:
            self.is_over = is_final
            self._gather_states(0)

    def fail(self, error: Exception) -> None:
        """Let the others know that this rank failed, before its error is raised."""
        if not self.is_over:
            self._gather_states(1 if is_out_of_memory(error) else 2, own=error)
        elif not self.is_known:
            with memory_is_final(self.ranks):
                raise error

    def _gather_states(self, state: int, own: Exception | None = None) -> None:
        """All-gather 0 (fine), 1 (out of memory) or 2 (failed), and raise if another rank is worse off."""
        states = [int(number) for (number,) in self.ranks.gather([float(state)])]
        if not any(states):
            return
        self.is_over = self.is_known = True
        if state == 2:
            return
        worst = max(states)
        rank = states.index(worst)
        if worst == 2:
            raise ParallelError(
                f"rank {rank} failed while it ran its micro-batches (its own error says why); no rank adds to its gradients."
            ) from own
        if own is None:
            raise MemoryError(f"on rank {rank}")


@contextmanager
def memory_is_final(ranks: Ranks) -> Iterator[None]:
    """Convert an out-of-memory error on one of several ranks to a final one, because ranks can no longer agree to retry."""
    try:
        yield
    except Exception as error:
        if ranks.size == 1 or not is_out_of_memory(error):
            raise
        raise MemoryLimitError(
            f"memory ran out on rank {ranks.rank} ({first_line(error)}) where the {ranks.size} ranks could no longer agree to "
            "start again. No rank adds to its gradients; let this process end, and the others end with it. Use a smaller "
            "micro-batch, or start all ranks again from the last checkpoint."
        ) from error


@dataclass(frozen=True, slots=True)
class StartGradient:
    """Gradient that backward starts from: share x ranks x loss scale.

    Multiplying the loss in the graph instead would cost 15 % of a tiny step.
    """

    factor: float
    """Factor of all shares: the number of ranks if gradients are averaged over them."""
    scaler: GradScaler | None

    def each(self, plan: BatchPlan, loss: Tensor) -> tuple[Tensor, ...]:
        """Return one for each pass, for losses of the dtype of `loss`: computed in fp32 or better, and rounded once."""
        dtype = torch.float32 if loss.itemsize < 4 else loss.dtype
        weights = tensor_on(plan.weights(self.factor), loss.device, dtype)
        weights = weights if self.scaler is None else self.scaler.scale(weights)
        return weights.to(loss.dtype).unbind()

    def multiplier(self) -> float:
        """Return the factor of every share. Reading the loss scale waits for the device."""
        return self.factor if self.scaler is None else self.factor * self.scaler.get_scale()

    def whole(self, loss: Tensor) -> Tensor:
        """Return the start for a loss over all rows of all ranks."""
        start = torch.full_like(loss, self.factor)
        return start if self.scaler is None else self.scaler.scale(start)


@dataclass(frozen=True, slots=True)
class DropNonfinite:
    """Policy that leaves non-finite micro-batches out. Checking one waits for the device."""

    model: nn.Module
    layers: Sequence[nn.Module]
    """Layers that keep running statistics."""

    def accepts(self, value: Batch) -> bool:
        """Return True if every number in `value` is finite."""
        return all(number_in(tensor.isfinite().all()) for tensor in tensors(value))

    def before_pass(self) -> Snapshot:
        """Snapshot the running statistics, to restore them if the pass is dropped."""
        return of_statistics(self.layers)

    def before_all(self) -> Snapshot:
        """Snapshot all buffers, to restore them if all passes run again without one."""
        return MovingBuffers([self.model]).snapshot()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Loss and metrics of one micro-batch, or of all of them together."""

    micro_batch: int | None
    """None for a loss that saw the rows of all micro-batches of all ranks at once."""
    units: float
    """Number that the loss averages over."""
    loss: Tensor | None
    """Detached; None for a mean over nothing."""
    metrics: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Losses and metrics of the passes of a batch; the gradient is in `.grad`."""

    parts: Sequence[Part] = ()
    dropped: Sequence[int] = ()
    """Micro-batches that were left out because they were not finite."""
    restart_without: Sequence[int] = ()
    """Non-finite micro-batches that affected the others: all passes have to run again without them."""
    dtype: torch.dtype = torch.float32
    """Dtype of the losses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The parts that a schedule works with, made once per attempt."""

    forward: ForwardPass
    gradients: GradientSum
    sync: Sync
    hooks: tuple[PassHook, ...]
    start: StartGradient
    events: Events
    dropping: DropNonfinite | None
    """None unless `on_nonfinite="drop"`."""
    barrier: Barrier
    ranks: Ranks
    needs_equal_passes: bool = False
    """True if every pass is a collective, so that none can run on one rank alone."""

    def accepts(self, value: Batch) -> bool:
        """Return False if non-finite micro-batches are dropped, and `value` is not finite."""
        return self.dropping is None or self.dropping.accepts(value)

    def loss_of(self, plan: BatchPlan, one: Pass) -> PartLoss:
        """Run one forward: its loss, checked to be a single differentiable number, and its metrics."""
        index = one.micro_batch
        part = part_loss(self.forward(plan.cut.micro_batches[index], index), plan.place(index))
        self.events.end_loss(part.loss, micro_batch=index, units=part.units, share=one.share)
        return part

    def quiet_forward(self) -> ForwardPass:
        """Return the same forward without events."""
        return replace(self.forward, events=SILENT)

    def backward(
        self, roots: Tensor | Sequence[Tensor], starts: Tensor | Sequence[Tensor], micro_batch: int | None = None
    ) -> bool:
        """Add the gradient of `roots`; return False if it was checked and is not finite."""
        if self.events is SILENT:
            return self.gradients.backward(roots, starts)
        self.events.begin(Backward)
        is_finite = self.gradients.backward(roots, starts)
        self.events.end(Backward, micro_batch=micro_batch)
        self.events.begin(Accumulate)
        self.events.end(Accumulate, micro_batch=micro_batch, parameters=self.gradients.parameters)
        return is_finite


def part_of(index: int, units: float, loss: Tensor | None, metrics: Metrics) -> Part:
    """Detach loss and metrics of a micro-batch, because the graph would keep its activations alive."""
    return Part(
        micro_batch=index,
        units=units,
        loss=None if loss is None else by_itself(loss),
        metrics=detached(metrics) if metrics else metrics,
    )


class Schedule(Protocol):
    """The order in which the passes of a batch run."""

    @property
    def layout(self) -> Layout:
        """Choice and order of the micro-batches that run."""

    def compute(self, model: nn.Module, micro_batch: Batch) -> Any:
        """Compute a loss, or representations."""

    @property
    def no_partial_gradients_because(self) -> str:
        """Reason why no micro-batch has a gradient of its own, for a message; empty if each has."""

    def needs(self, parallelism: Parallelism) -> Needs:
        """Return the requirements on the synchronisation over ranks."""

    def run(self, plan: BatchPlan, tools: Tools) -> Outcome:
        """Run the passes; afterwards the sum of their gradients is in `.grad` on this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulated:
    """Result of `Accumulator.backward`: loss, units and metrics of one batch. Reading a tensor waits for the device."""

    loss: Tensor
    """Loss of the whole batch, detached."""
    units: float
    """Number that the mean loss divides by: rows, target tokens, summed class weights."""
    micro_batches: int
    """Number of micro-batches."""
    metrics: Mapping[str, Tensor]
    """Metrics of the objective, for the whole batch."""
    dropped: tuple[int, ...] = ()
    """Numbers of the micro-batches that were left out because they were not finite."""
    retries: int = 0
    """Number of out-of-memory errors after which the batch started again in smaller micro-batches."""
    is_empty: bool = False
    """True for a mean over 0 units: the gradient is zeros."""

    __repr__ = one_line

    def _repr_html_(self) -> str:
        facts = {"loss": self.loss, "units": self.units, "micro_batches": self.micro_batches, **self.metrics}
        return html_block("The gradient of one batch is in .grad", facts_table(facts))

    @property
    def has_gradient(self) -> bool:
        """False if every micro-batch that counts was dropped."""
        return not self.dropped or self.units > 0


def result_of(plan: BatchPlan, outcome: Outcome, tools: Tools) -> Accumulated:
    """Join the results of all passes of all ranks."""
    loss, ranks = _loss_of(plan, outcome), tools.ranks
    own = [hook.numbers(plan.cut, [part.units for part in outcome.parts]) for hook in tools.hooks]
    totals = list(chain.from_iterable(own))
    if all(part.micro_batch is None for part in outcome.parts) and outcome.parts:
        rows = _rows_of_all(plan, outcome, ranks)
        result = _result(plan, outcome, loss, rows, [0])
    elif ranks.size == 1:
        result = _result(plan, outcome, loss, plan.cut, [part.micro_batch or 0 for part in outcome.parts])
    else:
        result, totals = _over_ranks(plan, outcome, loss, ranks, totals)
    units, summed = result.units, iter(totals)
    for hook, numbers in zip(tools.hooks, own, strict=True):
        if numbers:
            sums = [next(summed) for _ in numbers]
            hook.receive(sums, units, lambda: plan.left_over(units) / tools.start.multiplier())
    return result


def _result(
    plan: BatchPlan, outcome: Outcome, loss: Tensor, rows: MicroBatches | None, kept: Sequence[int]
) -> Accumulated:
    units = [part.units for part in outcome.parts]
    return Accumulated(
        loss=loss,
        units=sum(units),
        micro_batches=plan.num_micro_batches,
        metrics=combine([part.metrics for part in outcome.parts], units, rows, kept),
        dropped=tuple(outcome.dropped),
        is_empty=plan.is_empty,
    )


def _loss_of(plan: BatchPlan, outcome: Outcome) -> Tensor:
    """Return the loss of this rank's rows: 0 for a batch of no units, nan if all that counts was dropped."""
    if plan.is_empty:
        return torch.zeros(())
    counted = [(part.loss, part.units) for part in outcome.parts if part.loss is not None]
    if not counted:
        return torch.tensor(torch.nan)
    return weighted_sum([loss for loss, _ in counted], shares_of([units for _, units in counted], plan.reduction))


def _rows_of_all(plan: BatchPlan, outcome: Outcome, ranks: Ranks) -> MicroBatches | None:
    """Return the positions of all ranks' rows in the gathered batch, dropped rows last; None if no metric is `PerRow`."""
    has_rows = any(isinstance(metric, PerRow) for part in outcome.parts for metric in part.metrics.values())
    if not has_rows or (ranks.size == 1 and not outcome.dropped):
        return None
    joined: list[int] = []
    unseen: list[int] = []
    offset = 0
    for rows in ranks.gather_objects(plan.cut.row_numbers):
        for index, numbers in enumerate(rows):
            (unseen if index in outcome.dropped else joined).extend(offset + row for row in numbers)
        offset += sum(map(len, rows))
    return MicroBatches((plan.cut, None), Cut(rows=(tuple(sorted(joined)), tuple(unseen)), lengths=(0, 0)))


def _over_ranks(
    plan: BatchPlan, outcome: Outcome, loss: Tensor, ranks: Ranks, more: list[float]
) -> tuple[Accumulated, list[float]]:
    """Sum loss, units and the numbers in `more` over ranks in one small collective; metrics and drops take a second one.

    `PerRow` metrics have the rows of rank 0 first, then those of rank 1, and so on.
    """
    units = sum(part.units for part in outcome.parts)
    is_mean = plan.reduction == "mean"
    has_loss = units > 0 if is_mean else plan.num_own > len(outcome.dropped)
    own = float(loss) * (units if is_mean else 1.0) if has_loss else 0.0
    has_more = any(part.metrics for part in outcome.parts) or bool(outcome.dropped)
    # reading the loss waits for the device, as the units of the next batch will
    totals = ranks.sum([units, own, float(has_more), *more])
    value = totals[1]
    if is_mean:
        value = totals[1] / totals[0] if totals[0] else 0.0 if plan.is_empty else torch.nan
    metrics, dropped = _gathered(plan, outcome, ranks) if totals[2] else ({}, ())
    result = Accumulated(
        loss=torch.tensor(value, dtype=loss.dtype if has_loss else outcome.dtype, device=loss.device),
        units=totals[0],
        micro_batches=plan.num_micro_batches,
        metrics=metrics,
        dropped=dropped,
        is_empty=plan.is_empty,
    )
    return result, totals[3:]


def _gathered(plan: BatchPlan, outcome: Outcome, ranks: Ranks) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """All-gather the metrics of all micro-batches, and the numbers of the dropped ones."""
    held = [replace(part, loss=None, metrics=on_host(part.metrics)) for part in outcome.parts]
    has_rows = any(isinstance(metric, PerRow) for part in held for metric in part.metrics.values())
    every = ranks.gather_objects((held, outcome.dropped, plan.cut.row_numbers if has_rows else ()))
    parts: list[Part] = []
    placed: list[tuple[int, ...]] = []
    kept: list[int] = []
    dropped: list[int] = []
    offset = 0
    for rank, (own, left_out, rows) in enumerate(every):
        indices = [part.micro_batch or 0 for part in own]
        kept += [len(placed) + index for index in indices]
        parts += own
        placed += [tuple(row + offset for row in numbers) for numbers in rows] or [()] * (1 + max(indices, default=0))
        dropped += [plan.number(rank, index) for index in left_out]
        offset += sum(map(len, rows))
    cut = MicroBatches((None,) * len(placed), Cut(rows=tuple(placed), lengths=(0,) * len(placed)))
    metrics: list[Metrics] = [part.metrics for part in parts]
    return combine(metrics, [part.units for part in parts], cut, kept), tuple(dropped)


def run(plan: BatchPlan, schedule: Schedule, tools: Tools, after_passes: Callable[[], None]) -> Accumulated:
    """Add to `.grad` what one backward pass over the batch would add. An exception leaves `.grad` as it was.

    `after_passes()` is called while the passes can still be undone.
    """
    try:
        with tools.gradients:
            outcome = _passes(plan, schedule, tools)
            after_passes()
            tools.barrier.hold(is_final=True)
            tools.sync.close(tools.gradients.parameters)
            result = result_of(plan, outcome, tools)
            if not any(part.micro_batch is None for part in outcome.parts):  # a loss over all rows has no shares
                tools.gradients.scale = plan.left_over(result.units)
            if plan.is_empty:
                tools.gradients.zero()
    except BaseException as error:
        tools.sync.reset()
        if isinstance(error, Exception):
            tools.barrier.fail(error)
        raise
    finally:
        tools.events.close()
    for hook in tools.hooks:
        hook.finish()
    return result


def _passes(plan: BatchPlan, schedule: Schedule, tools: Tools) -> Outcome:
    """Run the passes. A non-finite micro-batch that affects the others (rows depend on each other, or a loss has terms)
    makes all of them run again without it."""
    runs_again = schedule.layout.runs_all or bool(plan.terms.each)
    before = None if tools.dropping is None or not runs_again else tools.dropping.before_all()
    watch = WriteWatch.of(plan.cut) if schedule.layout.runs_all else None
    dropped: list[int] = []
    while plan.passes:
        outcome = schedule.run(plan, tools)
        if not outcome.restart_without:
            return replace(outcome, dropped=sorted(dropped)) if dropped else outcome
        if watch is not None:
            watch.check("the others would run again without a micro-batch that is not finite,")
        assert before is not None
        before.put_back()
        tools.gradients.zero()
        dropped += outcome.restart_without
        plan = plan.without(outcome.restart_without)
    return Outcome(dropped=sorted(dropped))


def effect_on_loss(plan: BatchPlan, tools: Tools, state: BatchState, before: Snapshot) -> str:
    """Say how far the changed buffers move the loss of the first micro-batch; empty if this cannot be measured."""
    index = plan.passes[0].micro_batch
    after = MovingBuffers([tools.forward.model]).snapshot()

    def loss() -> float:
        rows = map_tensors(plan.cut[index], torch.clone)  # a forward may write into them
        return loss_and_metrics(tools.quiet_forward()(rows, index))[0].item()

    if tools.ranks.size > 1:
        return ""
    try:
        with torch.no_grad():
            moved = loss()
            state.put_back(replace(before, random=after.random))
            was = loss()
    except Exception:  # a loss that needs gradients, or representations, which are no loss
        return ""
    finally:
        after.put_back()
    return f" It moves the loss of the first micro-batch by {abs(moved - was) / (abs(was) or 1.0):.1e} of itself."
