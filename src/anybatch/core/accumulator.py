"""The accumulator: a batch in, its exact gradient in `.grad`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from anybatch.core.accumulated import Accumulated
from anybatch.core.agreement import OwnRows, count_rows, has_rows, plan_batch, size_of
from anybatch.core.barrier import Barrier, memory_is_final
from anybatch.core.batch_state import BatchState
from anybatch.core.cutting import Cutting
from anybatch.core.disk import TensorFile
from anybatch.core.engine import effect_on_loss, run
from anybatch.core.events import Observer, Retry
from anybatch.core.forward_pass import ForwardPass, ahead_of, is_there
from anybatch.core.gradients import GradientSum
from anybatch.core.hooks import PassHook
from anybatch.core.learner import autocast_context, check_drops, check_learner, common_device, passes_fp16
from anybatch.core.micro_batch_option import MicroBatch, as_split
from anybatch.core.micro_batches import Dealt, MicroBatches, Split, Workload
from anybatch.core.nesting import Batch
from anybatch.core.objective import Coupled, Objective
from anybatch.core.option_types import Autocast, BatchNorm, Offload
from anybatch.core.options import Option, Running, in_a_line, says_what_to_write
from anybatch.core.out_of_memory import free_bytes, once_more, until_it_fits
from anybatch.core.parameter_hooks import check_hooks
from anybatch.core.plan import BatchPlan
from anybatch.core.plugins import engine_of, masks_in, noise_history, norm_policy, row_numbers
from anybatch.core.schedule_choice import schedule_for
from anybatch.core.snapshot import Held, Slot, Snapshot, tracking_layers
from anybatch.core.telling import SILENT, Events, events_for
from anybatch.core.timing import stopwatch_for
from anybatch.core.tools import Dropping, Schedule, StartGradient, Tools
from anybatch.core.written_inputs import WriteWatch
from anybatch.errors import MemoryLimitError

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
