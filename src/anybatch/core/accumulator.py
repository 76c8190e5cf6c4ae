"""The accumulator: a batch in, its exact gradient in `.grad`."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from anybatch.core.batch import Batch, check_row_dim
from anybatch.core.engine import (
    Accumulated,
    Barrier,
    Dropping,
    ForwardPass,
    Schedule,
    StartGradient,
    Tools,
    ahead_of,
    effect_on_loss,
    is_there,
    memory_is_final,
    run,
)
from anybatch.core.events import SILENT, Events, Observer, Resize, Retry, events_for
from anybatch.core.gradients import GradientSum, check_hooks
from anybatch.core.hooks import NOTHING, PassHook
from anybatch.core.objective import Coupled, Objective
from anybatch.core.options import Autocast, BatchNorm, Offload, Option, Running, in_a_line, says_what_to_write
from anybatch.core.out_of_memory import free_bytes, once_more, until_it_fits
from anybatch.core.parallelism import Engine, Ranks
from anybatch.core.plan import BatchPlan, OwnRows, count_rows, has_rows, plan_batch, size_of
from anybatch.core.plugins import engine_of, masks_in, noise_history, norm_policy, row_numbers
from anybatch.core.schedules import schedule_for
from anybatch.core.snapshot import BatchState, Held, Slot, Snapshot, TensorFile, WriteWatch, tracking_layers
from anybatch.core.splits import (
    AsGiven,
    Dealt,
    MicroBatch,
    MicroBatches,
    Split,
    Workload,
    as_split,
    in_arrival_order,
    size_that_ran,
    smaller,
)
from anybatch.errors import BatchError, LossError, MemoryLimitError, ParallelError, UpdateError, levels_to_the_caller

EVERY = 10
"""After this many batches that went well, micro-batches double; after half as many, once the size that failed may be tried."""
WAIT = 20
"""After this many, the size that failed is tried again; each time that it fails again, this doubles."""
FREE = 1.5
"""With this many times the memory free that there was when it failed, the size that failed is not waited for."""


class WayBack:
    """Sizes that failed, and what is tried when.

    >>> way = WayBack()
    >>> way.fail(8, free=None)
    >>> [way.succeed(4, lambda: None) for _ in range(20)][9::10]
    [7, 8]
    """

    def __init__(self) -> None:
        self.highest = 0
        """The largest size that failed since the last time that all was well."""
        self._failed = 0
        self._free: int | None = None
        self._num_good = 0
        self._wait = WAIT
        self._tried_again: set[int] = set()

    def fail(self, size: int, free: int | None) -> None:
        """Micro-batches of this size did not fit, when so much was free."""
        if size in self._tried_again:
            self._wait *= 2
        self.highest = max(self.highest, size)
        self._failed, self._free, self._num_good = size, free, 0

    def succeed(self, size: int, free: Callable[[], int | None]) -> int:
        """Micro-batches of this size fitted; the size for the next batch, which is the same most of the time."""
        self._num_good += 1
        if self._num_good % (EVERY if self._failed else EVERY // 2):
            return size
        if self._failed and (self._num_good >= self._wait or self._is_freer(free())):
            self._tried_again.add(self._failed)
            self._failed = 0
        return min(2 * size, self._failed - 1) if self._failed else 2 * size

    def arrive(self) -> None:
        """Micro-batches have the size that was asked for again; how long to wait after the next failure is kept."""
        self.highest = self._failed = 0

    def _is_freer(self, free: int | None) -> bool:
        return free is not None and self._free is not None and free > FREE * self._free


class Cutting:
    """The cut of one batch after another. Those that come cut already stay as they are until memory runs out."""

    def __init__(self, split: Split, free: Callable[[], int | None] = lambda: None) -> None:
        self.split = split
        self._free = free
        """How much memory is free where the model is; None where nobody tells."""
        self._given: Split = AsGiven()
        self._asked: Split | None = None
        """What batches were cut by before memory ran out; None where they still are."""
        self._bound = 0
        """The largest micro-batch that it allowed then, where an even cut to it may have made what failed; else 0."""
        self._way_back = WayBack()
        self._has_warned = False
        self._is_row_dim_known = False

    def cut(self, batch: Batch, workload: Callable[[], Workload], *, as_they_came: bool = False) -> MicroBatches:
        """The micro-batches of `batch`; a split that chooses by the work hears what it is first."""
        if isinstance(batch, MicroBatches):
            return self._given.cut(batch)
        choose_for = self.split.choose_for
        if choose_for is not None:
            choose_for(workload(), batch)
        cut = self.split.cut(batch)
        if as_they_came:
            cut = in_arrival_order(self.split, batch, cut)
        if not self._is_row_dim_known and len(cut) > 1:
            self._is_row_dim_known = True
            if self.split.reads_dim_0:
                check_row_dim(workload().model, batch)
        return cut

    def again(self, batch: Batch, ranks: Ranks) -> Callable[[MicroBatches | None, str], None]:
        """What is called, with what ran and why it failed, each time that this batch has to start again.

        It makes micro-batches smaller. Where none can be, they are tried once more as they are, because it may have been
        somebody else's memory; then it is an error, and the next batch is cut as this one was at first.
        """
        split, first, is_last = self.split, None, False

        def start_again(ran: MicroBatches | None, reason: str) -> None:
            nonlocal first, is_last
            first = first or ran
            try:
                is_last = not self._shrink(batch, ran, ranks, reason, free=self._free(), is_last=is_last)
            except MemoryLimitError:
                self._as_before(split, first)
                raise

        return start_again

    def _shrink(
        self, batch: Batch, ran: MicroBatches | None, ranks: Ranks, reason: str, *, free: int | None, is_last: bool
    ) -> bool:
        """Cut in smaller micro-batches than `ran` from now on; where no rank can, False, or an error if `is_last`."""
        is_given = isinstance(batch.batch if isinstance(batch, Dealt) else batch, MicroBatches)
        before, size = self.split, None if ran is None or is_given else _size(self.split, ran)
        bound = 0 if size is None else before.bound
        found = None if ran is None else smaller(self._given if is_given else self.split, ran)
        if not ranks.any(found is not None):
            if not is_last:
                return False
            where = "before the first micro-batch ran" if ran is None else _least(ran)
            need = self.split.need
            predicted = "" if need is None else f" An update with one row needs {need}, as predicted."
            raise MemoryLimitError(
                f"memory ran out {where} ({reason}).{predicted} Gradients, buffers and random state are as they were. Use "
                "shorter rows, autocast=torch.bfloat16, torch.utils.checkpoint inside the model, or a smaller model."
            )
        if found is None:
            return True  # other ranks can make theirs smaller
        if is_given:
            self._given = found
            return True
        self.split = found
        if size is not None:
            if self._asked is None:
                self._asked, self._bound = before, bound if bound < 2 * size else 0
            self._way_back.fail(size, free)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"memory ran out ({reason}), and the batch started again in smaller micro-batches: {self.split!r} from now on. "
                "They grow again after batches that go well. Nothing is lost; this is said once.",
                stacklevel=levels_to_the_caller(),
            )
        return True

    def went_well(self, ran: MicroBatches | None, events: Events) -> None:
        """A batch fitted at once; where memory had run out before, the next one may be cut larger, and that is told."""
        if self._asked is None or ran is None or len(ran) == 1:
            return
        # a split that tunes may have run less than it was allowed
        size = self.split.bound or _size(self.split, ran)
        following = 0 if size is None else self._way_back.succeed(size, self._free)
        if size is not None and following > size and self._grow(self._asked, following):
            events.begin(Resize)
            events.end(Resize, split=repr(self.split))

    def _grow(self, asked: Split, size: int) -> bool:
        """Cut in micro-batches of up to `size`, or as was asked where that is as much; False of a split that knows no sizes."""
        resized = self.split.resized
        if size < self._way_back.highest:
            self.split = self.split if resized is None else resized(size)
            return resized is not None
        self.split = asked if asked is not self.split or resized is None else resized(max(size, self._bound))
        self._asked = None
        self._way_back.arrive()
        return True

    def _as_before(self, split: Split, ran: MicroBatches | None) -> None:
        """Cut by `split` again, which cut `ran`: what did not fit in any size says nothing of sizes."""
        size = None if ran is None else _size(split, ran)
        resized = split.resized
        # a split that changes itself is told the size that it had
        self.split = resized(size) if split is self.split and resized is not None and size is not None else split
        if self._asked is split:
            self._asked = None
            self._way_back.arrive()


def _size(split: Split, ran: MicroBatches) -> int | None:
    try:
        return size_that_ran(split, ran)
    except BatchError:
        return None  # micro-batches of the user's own making, whose rows nobody can count


def _least(ran: MicroBatches) -> str:
    """Why micro-batches that ran cannot be made smaller."""
    if ran.whole:
        return "in micro-batches that must stay whole (MicroBatches(whole=True))"
    if ran.together > 1:
        return f"in micro-batches of {ran.together} rows that belong together (groups=), which are never torn"
    return "with a single row in each micro-batch"


Learn = Callable[[MicroBatches, Sequence[float | None]], None]


class Stopwatch(PassHook):
    """Seconds of each micro-batch, from the end of the one before it; on a device, by events that are read at the finish.

    Reading events waits for the device once per batch; nothing else here does.
    """

    def __init__(
        self,
        learn: Learn,
        ran: MicroBatches,
        device: torch.device,
    ) -> None:
        self._learn = learn
        self._ran = ran
        self._device = None if device.type == "cpu" else device
        self._laps: list[tuple[int, Any]] = [(-1, self._now())]

    def after_pass(self, micro_batch: int, *, is_kept: bool, reports: bool) -> None:
        if reports:
            self._laps.append((micro_batch, self._now()))

    def finish(self) -> None:
        """The batch has run whole: tell the split, unless no micro-batch ran for itself."""
        if len(self._laps) == 1:
            return
        if self._device is not None:
            self._laps[-1][1].synchronize()
        seconds: list[float | None] = [None] * len(self._ran)
        for (_, before), (index, after) in zip(self._laps, self._laps[1:], strict=False):
            seconds[index] = after - before if self._device is None else before.elapsed_time(after) / 1000
        self._learn(self._ran, seconds)

    def _now(self) -> Any:
        if self._device is None:
            return perf_counter()
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        return event


def stopwatch_for(split: Split, batch: Batch, ran: MicroBatches, device: torch.device | None) -> Stopwatch | None:
    """Return a stopwatch if the split learns from times, and `batch` did not come cut already."""
    learn = split.learn
    if learn is None or isinstance(batch, MicroBatches):
        return None
    return Stopwatch(learn, ran, device or torch.device("cpu"))


def autocast_context(autocast: Autocast, device: torch.device | None) -> AbstractContextManager[object]:
    """The block in which a forward runs; without autocast, one that does nothing."""
    if isinstance(autocast, torch.dtype):
        return torch.autocast(device.type if device is not None else "cpu", dtype=autocast)
    return NOTHING if autocast is None else autocast


def common_device(parameters: Iterable[nn.Parameter]) -> torch.device | None:
    """The device that all parameters share, if they do."""
    devices = {parameter.device for parameter in parameters}
    return devices.pop() if len(devices) == 1 else None


def passes_fp16(parameters: Iterable[nn.Parameter], autocast: AbstractContextManager[object]) -> bool:
    """True where gradients pass through fp16, whose smallest number is 6e-8."""
    if isinstance(autocast, torch.autocast) and autocast.fast_dtype is torch.float16:
        return True
    return any(parameter.dtype is torch.float16 for parameter in parameters)


def check_model(model: nn.Module) -> None:
    """Refuse what is no module."""
    if not isinstance(model, nn.Module):
        raise UpdateError(f"model={model!r:.80} is a {type(model).__name__}; expected a torch.nn.Module.")


def check_learner(model: nn.Module, objective: Objective | Coupled) -> None:
    """Refuse what is no module, and what is no objective."""
    check_model(model)
    if not isinstance(objective, Objective | Coupled):
        raise LossError(
            f"objective={objective!r} is a {type(objective).__name__}; expected an Objective. Use "
            "supervised(criterion), huggingface(), Objective(loss, units) or Coupled(encode, loss)."
        )


def check_drops(running: Running, objective: Objective | Coupled, engine: Engine) -> None:
    """Refuse to leave single micro-batches out where no rank could tell which one it was."""
    if not running.drops:
        return
    if engine.is_even:
        raise ParallelError(
            "a model sharded by fully_shard cannot leave single micro-batches out: no rank has one's gradient alone. Use "
            "on_nonfinite='skip', which leaves the update out, or DistributedDataParallel."
        )
    looks_around = running.batch_norm == "exact" or isinstance(objective, Coupled) or bool(objective.terms)
    if looks_around and engine.ranks.size > 1:
        raise ParallelError(
            f"on {engine.ranks.size} ranks, micro-batches whose rows look at each other, or whose loss has terms with units of "
            "their own, are not left out one by one. "
            "Use on_nonfinite='skip', which leaves the update out."
        )


if TYPE_CHECKING:
    from anybatch.dropout import Masks
    from anybatch.noise import NoiseHistory


class Accumulator:
    """Gradients of whole batches from micro-batches that fit.

    `parameters()` gives those whose gradients are kept apart, summed in fp32 and put back after an error: the model's by
    default; name here whatever else the optimizer steps, such as the parameters of a criterion. With `drop_nonfinite`, a
    micro-batch whose loss or gradient is inf or nan is left out and the rest renormalised; this needs a second set of
    gradients and waits for the device after each micro-batch. With `keep_fp32`, gradients of bf16 and fp16 parameters stay
    fp32 after the sum, for optimizers that take them so.

    `batch_norm` says what BatchNorm layers in training see: `"exact"`, the whole batch, with gradients through its statistics;
    `"micro"`, each micro-batch for itself, running statistics merged to one update; `"frozen"`, the running statistics. None
    is `"micro"` with one warning. In `"exact"` all micro-batches' graphs live at once; `offload` says where what they save is
    kept: `"host"` memory, for accelerators, `"disk"`, None for where it is, or `"auto"`: in place up to half of the free
    memory, then out, to the host from an accelerator, to disk from the CPU.

    A model in `DistributedDataParallel` or sharded by `fully_shard` is given as it is: the batch is then what all ranks give
    together, each its own rows, None where it has none. Gradients are synchronised once, in the last backward pass; loss,
    units and metrics are the whole batch's, on every rank. With `reshard=False`, FSDP2 keeps parameters gathered from one
    micro-batch to the next: fewer all-gathers for more memory. With `prefetch`, the next micro-batch is brought from pinned
    memory to an accelerator while one runs. `running` gives all these options as one value.

    Where memory runs out, the batch starts again in micro-batches of half the size; they grow when batches go well.

    >>> import torch
    >>> model = nn.Linear(3, 1)
    >>> accumulator = Accumulator(model, Objective(lambda model, x: model(x).square().mean()), micro_batch=4)
    >>> accumulator.backward(torch.randn(10, 3)).micro_batches
    3
    """

    autocast = Option()
    __repr__ = in_a_line

    @says_what_to_write
    def __init__(
        self,
        model: nn.Module,
        objective: Objective | Coupled,
        *,
        micro_batch: MicroBatch,
        autocast: Autocast = None,
        batch_norm: BatchNorm | None = None,
        offload: Offload = "auto",
        parameters: Callable[[], Iterable[nn.Parameter]] | None = None,
        drop_nonfinite: bool = False,
        keep_fp32: bool = False,
        reshard: bool = True,
        prefetch: bool = False,
        observer: Observer | None = None,
        running: Running | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        check_learner(model, objective)
        self.running = running or Running(
            autocast=autocast,
            batch_norm=batch_norm,
            offload=offload,
            reshard=reshard,
            prefetch=prefetch,
            on_nonfinite="drop" if drop_nonfinite else "raise",
        )
        self.engine = engine_of(model, reshard=self.running.reshard)
        self.model = model
        self.objective = objective
        self._cutting = Cutting(as_split(micro_batch), lambda: free_bytes(common_device(self.parameters())))
        self.observer = observer
        self.parameters = model.parameters if parameters is None else parameters
        self.keep_fp32 = keep_fp32
        self.norms = norm_policy(model, self.running.batch_norm)
        self._optimizer = optimizer
        self.noise = noise_history(self.running.noise, self._stepped)
        check_drops(self.running, objective, self.engine)
        own_loss = [objective.loss] if isinstance(objective.loss, nn.Module) else []
        self._state = BatchState([model, *own_loss], self._look_at_modules)
        self._file = TensorFile()
        self._proven_size = 0
        self._num_masks = 0

    def backward(
        self, batch: Batch, *, scaler: GradScaler | None = None, before: Snapshot | None = None
    ) -> Accumulated:
        """Add to `.grad` what one backward pass over the whole batch would add.

            grad += sum_k (units_k / units) * d loss(micro_batch_k)

        Exact up to summation order when rows do not look at each other. Gradients are neither zeroed, clipped nor
        stepped here. Micro-batches are moved to the model's device one at a time. With a `scaler`, gradients come out scaled:
        unscale them before clipping. A batch of 0 units leaves zero gradients. An exception leaves `.grad` and buffers as they
        were before the call, which `before` says, where `before_batch` was asked already.
        """
        before = before or self.before_batch()
        if self._masks is not None:
            self._masks.begin()
        try:
            return self._until_it_fits(batch, scaler, before)
        except BaseException:
            self.forget_batch(before.buffers)
            raise

    def before_batch(self) -> Snapshot:
        """What a batch may change beside gradients, to go back to: buffers, and torch's random state."""
        before = once_more(self._state.snapshot)
        self._num_masks = 0 if self._masks is None else self._masks.update
        return before

    def forget_batch(self, buffers: Mapping[Slot, Held]) -> None:
        """Make buffers what they were before a batch that teaches nothing; its rows draw the same masks again."""
        self._state.forget(buffers)
        if self._masks is not None:
            self._masks.update = self._num_masks

    def end_update(self, grad_norm: Tensor, *, applied: bool) -> "NoiseHistory | None":
        """Record the noise of the gradient of an update that is over, and return the record; None without one."""
        if self.noise is not None:
            self.noise.add(grad_norm, applied=applied)
        return self.noise

    def _until_it_fits(self, batch: Batch, scaler: GradScaler | None, before: Snapshot) -> Accumulated:
        events = events_for(self.observer)
        watch, smaller = WriteWatch.of(batch), self._cutting.again(batch, self.engine.ranks)
        ran: MicroBatches | None = None

        def attempt() -> Accumulated:
            nonlocal ran
            ran = None
            with memory_is_final(self.engine.ranks):
                plan, schedule, tools = self.prepare(batch, scaler, events)
            ran = plan.cut
            result = run(plan, schedule, tools, lambda: self._look(plan, tools, before))
            if self.engine.ranks.size > 1:
                self._proven_size = max(self._proven_size, *map(size_of, plan.cut.micro_batches))
            return result

        def start_again(reason: str) -> None:
            watch.check(f"this batch would start again, because memory ran out ({reason}),")
            lost = self._state.put_back(before)
            if self.engine.ranks.any(bool(lost)):
                raise MemoryLimitError(
                    f"memory ran out ({reason}), and this batch cannot start again: it was the first to change "
                    f"{', '.join(lost)}, of which there is no copy. Give the next batch: from now on copies are made."
                )
            smaller(ran, reason)
            events.begin(Retry)
            events.end(Retry, reason=reason)

        if not self._can_start_again():
            return attempt()
        result, retries = until_it_fits(attempt, start_again)
        self._cutting.went_well(ran if not retries else None, events)
        return replace(result, retries=retries) if retries else result

    def _look(self, plan: BatchPlan, tools: Tools, before: Snapshot) -> None:
        if len(plan.passes) > 1:
            effect = partial(effect_on_loss, plan, tools, self._state, before)
            knows = self.norms.knows if self.norms is not None else lambda module, buffer: False
            self._state.tell_moving(knows, len(plan.passes), effect)

    def _stepped(self) -> list[nn.Parameter]:
        """The parameters that the optimizer steps; without one, all whose gradients are summed."""
        if self._optimizer is None:
            return list(self.parameters())
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    @property
    def split(self) -> Split:
        """What batches are cut by: what was asked for, or something smaller since memory ran out."""
        return self._cutting.split

    @split.setter
    def split(self, split: Split) -> None:
        self._cutting.split = as_split(split)

    @property
    def workload(self) -> Workload:
        """What micro-batches are cut for: all that the memory of an update depends on."""
        parts = {"model": self.model, "objective": self.objective, "optimizer": self._optimizer}
        return Workload(**parts, running=self.running)

    def prepare(
        self, batch: Batch, scaler: GradScaler | None = None, events: Events = SILENT, given: Schedule | None = None
    ) -> tuple[BatchPlan, Schedule, Tools]:
        """All that comes before the first forward: the plan of the batch, how it runs (`given`, if it is), and with what."""
        parameters = [*self.parameters(), *self.objective.parameters()]
        device = common_device(parameters) or common_device(self.model.parameters())
        autocast = autocast_context(self.running.autocast, device)
        ranks, error = self.engine.ranks, None
        try:
            own = once_more(lambda: self._own_rows(batch, parameters))
        except Exception as raised:
            if ranks.size == 1:
                raise
            own, error = OwnRows(), raised  # the other ranks are told before it is raised
        is_cut = ranks.size > 1 or own.num_micro_batches > 1
        norms = self.norms
        layers = {} if norms is None else norms.touched(is_cut=is_cut)
        averaging = {} if norms is None else norms.averaging(is_cut=is_cut)
        schedule = given or schedule_for(self.objective, layers, averaging, self.running, self._file)
        needs = schedule.needs(self.engine)
        plan = plan_batch(
            ranks,
            own,
            schedule.layout,
            even_passes=needs.even_passes,
            underflows=scaler is None and passes_fp16(parameters, autocast),
            proven_size=self._proven_size,
            num_terms=len(self.objective.terms),
            error=error,
        )
        sync = self.engine.sync(needs, is_proven=plan.is_proven, leaves_out=plan.num_left_out > 0)
        barrier = Barrier(ranks, is_over=ranks.size == 1 or needs.even_passes or needs.one_collective)
        hooks = list(self._noise_hooks(plan, schedule)) or list(self._stopwatch(batch, plan, device))
        if norms is not None:
            norms.warn_once(layers, plan.cut, plan.num_micro_batches)
            hooks[:0] = norms.hooks(layers, averaging, ranks, barrier.hold, is_cut=len(plan.cut) > 1)
        if self._masks is not None:
            hooks.append(row_numbers(self._masks, self.model, plan.cut, batch, ranks))
        drops = self.running.drops and not plan.is_empty
        tools = Tools(
            forward=ForwardPass(
                model=self.model,
                compute=schedule.compute,
                device=None if is_there(plan.cut[0], device) else device,
                ahead=ahead_of(plan, device, self.running),
                autocast=autocast,
                hooks=tuple(hooks),
                events=events,
            ),
            gradients=GradientSum(
                parameters,
                keep_fp32=self.keep_fp32,
                in_fp32=self.running.sums_fp32(self.split),
                isolate=drops and scaler is None,  # an overflow of the scaled gradient is the scaler's to see
                copies=self.engine.overwrites,
            ),
            sync=sync,
            hooks=tuple(hooks),
            start=StartGradient(sync.factor, scaler),
            events=events,
            dropping=Dropping(self.model, tracking_layers(self.model)) if drops else None,
            barrier=barrier,
            ranks=ranks,
            is_even=needs.even_passes,
        )
        return plan, schedule, tools

    def _own_rows(self, batch: Batch, parameters: list[nn.Parameter]) -> OwnRows:
        """Cut this rank's rows and count their units."""
        is_stand_in = isinstance(batch, Dealt) and batch.is_stand_in
        rows = batch.batch if isinstance(batch, Dealt) else batch
        cut = None
        if self.engine.ranks.size == 1 or not (is_stand_in or not has_rows(rows)):
            is_measured = self.noise is not None and self.noise.is_due
            cut = self._cutting.cut(rows, lambda: self.workload, as_they_came=is_measured)
            check_hooks(parameters, self.model.named_parameters, len(cut))
        return count_rows(self.objective, self.model, cut, is_stand_in=is_stand_in)

    def _noise_hooks(self, plan: BatchPlan, schedule: Schedule) -> Iterator[PassHook]:
        if self.noise is not None:
            found = self.noise.hook(
                hides_parts=schedule.hides_parts,
                is_sharded=self.engine.is_even,
                num_micro_batches=plan.num_micro_batches,
            )
            yield from () if found is None else (found,)

    def _stopwatch(self, batch: Batch, plan: BatchPlan, device: torch.device | None) -> Iterator[PassHook]:
        found = stopwatch_for(self.split, batch, plan.cut, device)
        yield from () if found is None else (found,)

    def _look_at_modules(self) -> None:
        """Find the normalisation layers of the model as it is now."""
        self.norms = norm_policy(self.model, self.running.batch_norm, self.norms)

    @cached_property
    def _masks(self) -> "Masks | None":
        """The masks of the model's swapped dropout layers. Looked for once, at the first batch."""
        return masks_in(self.model)

    def _can_start_again(self) -> bool:
        """False where a rank that fails amid collectives cannot tell the others: it starts nothing again alone."""
        is_exact = (
            self.running.batch_norm == "exact" and self.norms is not None and bool(self.norms.touched(is_cut=True))
        )
        return self.engine.ranks.size == 1 or not (self.engine.is_even or is_exact)
