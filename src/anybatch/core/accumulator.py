"""`Accumulator`: a batch in, its exact gradient in `.grad`."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Unpack

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from anybatch.core.batch import Batch
from anybatch.core.cutting import Cutting, Stopwatch
from anybatch.core.engine import (
    Accumulated,
    Ahead,
    Barrier,
    DropNonfinite,
    ForwardPass,
    Schedule,
    StartGradient,
    Tools,
    effect_on_loss,
    is_there,
    memory_is_final,
    run,
)
from anybatch.core.events import SILENT, Events, Observer, Retry, events_for
from anybatch.core.gradients import GradientSum, check_hooks
from anybatch.core.hooks import NOTHING, PassHook
from anybatch.core.objective import Coupled, Objective
from anybatch.core.options import (
    Autocast,
    BatchNorm,
    MoreOptions,
    Option,
    UpdateOptions,
    checks_arguments,
    options_of,
    repr_of,
)
from anybatch.core.out_of_memory import free_bytes, once_more, until_it_fits
from anybatch.core.parallelism import Parallelism
from anybatch.core.plan import BatchPlan, OwnRows, count_rows, has_rows, plan_batch, size_of
from anybatch.core.plugins import masks_in, noise_history, norm_policy, parallelism_of, row_numbers
from anybatch.core.schedules import schedule_for
from anybatch.core.snapshot import BatchState, Held, Slot, Snapshot, TensorFile, WriteWatch, tracking_layers
from anybatch.core.splits import Dealt, MicroBatch, MicroBatches, Split, Workload, as_split
from anybatch.errors import LossError, MemoryLimitError, ParallelError, UpdateError

if TYPE_CHECKING:
    from anybatch.dropout import Masks


class Accumulator:
    """Gradients of whole batches from micro-batches that fit in memory.

    `backward(batch)` replaces `loss.backward()` in a loop of your own. If memory runs out, the batch runs again in
    micro-batches of half the size; they grow again after batches that fit. On several ranks, each gives its own rows (None if
    it has none), and gradients are reduced once per batch.

    Args:
        model: A module, plain, compiled, in `DistributedDataParallel` or sharded by `fully_shard`.
        objective: The loss and the units it averages over, such as `supervised(nn.CrossEntropyLoss())`.
        micro_batch: The rows that one forward and backward holds in memory: a number of rows, a split such as
            `Tokens(8192)`, or "auto".
        autocast: A dtype to autocast the forward to, or a `torch.autocast(...)` context.
        batch_norm: Statistics of BatchNorm layers: "exact", "micro" or "frozen"; see `UpdateOptions`.
        parameters: Function that returns the parameters whose gradients are summed in fp32 and restored after an error; the
            model's by default. Include the parameters of a criterion, if it has any.
        drop_nonfinite: Leave a micro-batch with an inf or nan out, and renormalise the rest. Needs a second set of gradients.
        keep_fp32: Leave gradients of bf16 and fp16 parameters in fp32, for an optimizer that takes them so.
        options: All options as one value; single keywords win. `offload`, `reshard`, `prefetch`, `sums` and `observer` (a
            function that is called with each stage, see `anybatch.stages`) can also be given as keywords.
        optimizer: The optimizer that will step, for splits that predict memory.

    Raises:
        ArgumentsError: If an argument is missing or unknown.
        UpdateError: If `model` is not a module, or an option has a wrong value.
        LossError: If `objective` is not an objective.
        ParallelError: If the options cannot be exact on these ranks.

    Example:
        >>> import torch
        >>> model = nn.Linear(3, 1)
        >>> accumulator = Accumulator(model, Objective(lambda model, x: model(x).square().mean()), micro_batch=4)
        >>> accumulator.backward(torch.randn(10, 3)).micro_batches
        3
    """

    autocast = Option()
    running = property(attrgetter("options"))  # former name
    __repr__ = repr_of

    @checks_arguments
    def __init__(
        self,
        model: nn.Module,
        objective: Objective | Coupled,
        *,
        micro_batch: MicroBatch,
        autocast: Autocast = None,
        batch_norm: BatchNorm | None = None,
        parameters: Callable[[], Iterable[nn.Parameter]] | None = None,
        drop_nonfinite: bool = False,
        keep_fp32: bool = False,
        options: UpdateOptions | None = None,
        optimizer: Optimizer | None = None,
        **more: Unpack[MoreOptions],
    ) -> None:
        check_model(model)
        if not isinstance(objective, Objective | Coupled):
            raise LossError(
                f"objective={objective!r} is a {type(objective).__name__}; expected an Objective. Use "
                "supervised(criterion), huggingface(), Objective(loss, units) or Coupled(encode, loss)."
            )
        on_nonfinite = "drop" if drop_nonfinite else None
        spelled = {"autocast": autocast, "batch_norm": batch_norm, "on_nonfinite": on_nonfinite}
        self.options = options_of(options, spelled, more)
        self.parallelism = parallelism_of(model, reshard=self.options.reshard)
        self.model = model
        self.objective = objective
        self.observer: Observer | None = more.get("observer")
        self.parameters = model.parameters if parameters is None else parameters
        self.keep_fp32 = keep_fp32
        self.norms = norm_policy(model, self.options.batch_norm)
        self._optimizer = optimizer
        self.noise = noise_history(self.options.noise, self._stepped)
        self._cutting = Cutting(as_split(micro_batch), lambda: free_bytes(common_device(self.parameters())))
        check_drops(self.options, objective, self.parallelism)
        own_loss = [objective.loss] if isinstance(objective.loss, nn.Module) else []
        self._state = BatchState([model, *own_loss], self._find_norms)
        self._file = TensorFile()
        self._largest_seen = 0
        self._num_masks = 0

    def backward(
        self, batch: Batch, *, scaler: GradScaler | None = None, before: Snapshot | None = None
    ) -> Accumulated:
        """Add to `.grad` what one backward pass over the whole batch would add.

            grad += sum_k (units_k / units) * d loss(micro_batch_k)

        Exact up to summation order if rows do not depend on each other, or the objective is `Coupled`. Does not zero, clip or
        step. A batch of 0 units leaves zero gradients. An exception leaves `.grad` and buffers as they were.

        Args:
            batch: Any nesting of tensors that share their first dimension, or `MicroBatches`. Micro-batches are moved to the
                model's device one at a time.
            scaler: A loss scaler; gradients stay scaled, to be unscaled before clipping.
            before: A snapshot from `before_batch`, if it was taken already.

        Returns:
            Loss, units and metrics of the whole batch.

        Raises:
            BatchError: If the rows of the batch cannot be counted.
            LossError: If the objective does not return one differentiable number.
            MemoryLimitError: If memory runs out with a single row per micro-batch.
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
        """Snapshot buffers and torch's random state, for a batch that may run again."""
        before = once_more(self._state.snapshot)
        self._num_masks = 0 if self._masks is None else self._masks.update
        return before

    def forget_batch(self, buffers: Mapping[Slot, Held]) -> None:
        """Restore `buffers` after a batch without a step; the same rows will draw the same dropout masks again."""
        self._state.forget(buffers)
        if self._masks is not None:
            self._masks.update = self._num_masks

    @property
    def split(self) -> Split:
        """Split in use: the one given, or a smaller one after memory ran out."""
        return self._cutting.split

    @split.setter
    def split(self, split: Split) -> None:
        self._cutting.split = split

    @property
    def workload(self) -> Workload:
        """Everything but the batch that the memory of an update depends on."""
        return Workload(model=self.model, objective=self.objective, optimizer=self._optimizer, options=self.options)

    def _until_it_fits(self, batch: Batch, scaler: GradScaler | None, before: Snapshot) -> Accumulated:
        events, ranks = events_for(self.observer), self.parallelism.ranks
        watch = WriteWatch.of(batch)
        ran: MicroBatches | None = None
        smaller: Callable[[MicroBatches | None, str], None] | None = None

        def attempt() -> Accumulated:
            nonlocal ran
            ran = None
            with memory_is_final(ranks) if ranks.size > 1 else NOTHING:
                plan, schedule, tools = self.prepare(batch, scaler, events)
            ran = plan.cut
            result = run(plan, schedule, tools, lambda: self._warn_of_moving_buffers(plan, tools, before))
            if ranks.size > 1:
                self._largest_seen = max(self._largest_seen, *map(size_of, plan.cut.micro_batches))
            return result

        def start_again(reason: str) -> None:
            nonlocal smaller
            watch.check(f"this batch would start again, because memory ran out ({reason}),")
            lost = self._state.put_back(before)
            if ranks.any(bool(lost)):
                raise MemoryLimitError(
                    f"memory ran out ({reason}), and this batch cannot start again: it was the first to change "
                    f"{', '.join(lost)}, of which there is no copy. Give the next batch: from now on copies are made."
                )
            smaller = smaller or self._cutting.again(batch, ranks)
            smaller(ran, reason)
            events.begin(Retry)
            events.end(Retry, reason=reason)

        if ranks.size > 1 and (self.parallelism.needs_equal_passes or self._is_in_lockstep()):
            return attempt()  # a rank that fails between collectives cannot agree with the others to start again
        result, retries = until_it_fits(attempt, start_again)
        self._cutting.went_well(ran if not retries else None, events)
        return replace(result, retries=retries) if retries else result

    def _is_in_lockstep(self) -> bool:
        norms = self.norms
        return self.options.batch_norm == "exact" and norms is not None and bool(norms.touched(is_cut=True))

    def _warn_of_moving_buffers(self, plan: BatchPlan, tools: Tools, before: Snapshot) -> None:
        if len(plan.passes) > 1:
            knows = self.norms.knows if self.norms is not None else lambda module, buffer: False
            effect = partial(effect_on_loss, plan, tools, self._state, before)
            self._state.warn_of_moving(knows, len(plan.passes), effect)

    def prepare(
        self, batch: Batch, scaler: GradScaler | None = None, events: Events = SILENT, given: Schedule | None = None
    ) -> tuple[BatchPlan, Schedule, Tools]:
        """Decide everything about `batch` before its first forward: the plan, the schedule (or `given`), and its tools.

        `scaler` scales the start of each backward, and `events` get the stages of the passes.
        """
        options, ranks = self.options, self.parallelism.ranks
        parameters = [*self.parameters(), *self.objective.parameters()]
        device = common_device(parameters) or common_device(self.model.parameters())
        autocast = autocast_context(options.autocast, device)
        error: Exception | None = None
        try:
            own = once_more(lambda: self._own_rows(batch, parameters))
        except Exception as raised:
            if ranks.size == 1:
                raise
            own, error = OwnRows(), raised  # plan_batch raises it after the other ranks know
        is_cut = ranks.size > 1 or own.cut is None or len(own.cut.micro_batches) > 1
        norms = self.norms
        layers = {} if norms is None else norms.touched(is_cut=is_cut)
        averaging = {} if norms is None else norms.averaging(is_cut=is_cut)
        schedule = given or schedule_for(self.objective, layers, averaging, options, self._file)
        needs = schedule.needs(self.parallelism)
        plan = plan_batch(
            ranks,
            own,
            schedule.layout,
            needs_equal_passes=needs.needs_equal_passes,
            underflows=scaler is None and passes_fp16(parameters, autocast),
            largest_seen=self._largest_seen,
            num_terms=len(self.objective.terms),
            error=error,
        )
        sync = self.parallelism.sync(needs, last_pass_fits=plan.last_pass_fits, leaves_out=plan.num_left_out > 0)
        barrier = Barrier(ranks, is_over=ranks.size == 1 or needs.needs_equal_passes or needs.one_collective)
        hooks = self._timing_hooks(batch, plan, schedule, device)
        if norms is not None:
            norms.warn_once(layers, plan.cut, plan.num_micro_batches)
            hooks[:0] = norms.hooks(layers, averaging, ranks, barrier.hold, is_cut=len(plan.cut) > 1)
        if self._masks is not None:
            hooks.append(row_numbers(self._masks, self.model, plan.cut, batch, ranks))
        drops = options.drops and not plan.is_empty
        prefetches = options.prefetch and device is not None and device.type != "cpu"
        tools = Tools(
            forward=ForwardPass(
                model=self.model,
                compute=schedule.compute,
                device=None if is_there(plan.cut.micro_batches[0], device) else device,
                ahead=Ahead(plan, device) if prefetches and device is not None else None,
                autocast=autocast,
                hooks=tuple(hooks),
                events=events,
            ),
            gradients=GradientSum(
                parameters,
                keep_fp32=self.keep_fp32,
                in_fp32=options.sums_fp32(self._cutting.split),
                isolate=drops and scaler is None,  # an overflow of the scaled gradient is the scaler's to see
                copies=self.parallelism.overwrites,
            ),
            sync=sync,
            hooks=tuple(hooks),
            start=StartGradient(sync.factor, scaler),
            events=events,
            dropping=DropNonfinite(self.model, tracking_layers(self.model)) if drops else None,
            barrier=barrier,
            ranks=ranks,
            needs_equal_passes=needs.needs_equal_passes,
        )
        return plan, schedule, tools

    def _own_rows(self, batch: Batch, parameters: list[nn.Parameter]) -> OwnRows:
        """Cut this rank's rows and count their units."""
        is_stand_in = isinstance(batch, Dealt) and batch.is_stand_in
        rows = batch.batch if isinstance(batch, Dealt) else batch
        cut = None
        if self.parallelism.ranks.size == 1 or not (is_stand_in or not has_rows(rows)):
            is_measured = self.noise is not None and self.noise.is_due
            cut = self._cutting.cut(rows, lambda: self.workload, as_they_came=is_measured)
            check_hooks(parameters, self.model.named_parameters, len(cut.micro_batches))
        return count_rows(self.objective, self.model, cut, is_stand_in=is_stand_in)

    def _timing_hooks(
        self, batch: Batch, plan: BatchPlan, schedule: Schedule, device: torch.device | None
    ) -> list[PassHook]:
        """Measure noise if this batch is due; else time the micro-batches for a split that learns from times."""
        if self.noise is not None:
            hook = self.noise.hook(
                no_partial_gradients_because=schedule.no_partial_gradients_because,
                is_sharded=self.parallelism.needs_equal_passes,
                num_micro_batches=plan.num_micro_batches,
            )
            if hook is not None:
                return [hook]
        learn = self._cutting.split.learn
        return [] if learn is None or isinstance(batch, MicroBatches) else [Stopwatch(learn, plan.cut, device)]

    def _stepped(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizer steps; without one, all whose gradients are summed."""
        if self._optimizer is None:
            return list(self.parameters())
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _find_norms(self) -> None:
        self.norms = norm_policy(self.model, self.options.batch_norm, self.norms)

    @cached_property
    def _masks(self) -> "Masks | None":
        """Masks of the layers that `row_dropout` swapped, as of the first batch."""
        return masks_in(self.model)


def autocast_context(autocast: Autocast, device: torch.device | None) -> AbstractContextManager[object]:
    """Return the context manager around a forward."""
    if isinstance(autocast, torch.dtype):
        return torch.autocast(device.type if device is not None else "cpu", dtype=autocast)
    return NOTHING if autocast is None else autocast


def common_device(parameters: Iterable[nn.Parameter]) -> torch.device | None:
    """Return the device that all parameters share; None if they are on several."""
    devices = {parameter.device for parameter in parameters}
    return devices.pop() if len(devices) == 1 else None


def passes_fp16(parameters: Iterable[nn.Parameter], autocast: AbstractContextManager[object]) -> bool:
    """True if gradients pass through fp16, whose smallest number is 6e-8."""
    if isinstance(autocast, torch.autocast) and autocast.fast_dtype is torch.float16:
        return True
    return any(parameter.dtype is torch.float16 for parameter in parameters)


def check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise UpdateError(f"model={model!r:.80} is a {type(model).__name__}; expected a torch.nn.Module.")


def check_drops(options: UpdateOptions, objective: Objective | Coupled, parallelism: Parallelism) -> None:
    """Refuse `on_nonfinite="drop"` if no rank can tell which micro-batch was not finite."""
    if not options.drops:
        return
    if parallelism.needs_equal_passes:
        raise ParallelError(
            "a model sharded by fully_shard cannot leave single micro-batches out: no rank has one's gradient alone. Use "
            "on_nonfinite='skip', which leaves the update out, or DistributedDataParallel."
        )
    is_coupled = options.batch_norm == "exact" or isinstance(objective, Coupled) or bool(objective.terms)
    if is_coupled and parallelism.ranks.size > 1:
        raise ParallelError(
            f"on {parallelism.ranks.size} ranks, micro-batches whose rows look at each other, or whose loss has terms with "
            "units of their own, are not left out one by one. Use on_nonfinite='skip', which leaves the update out."
        )
