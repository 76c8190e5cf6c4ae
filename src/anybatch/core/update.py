"""The update in its one right order: zero, micro-batches, unscale, clip, step, scaler, scheduler."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anybatch.core.accumulator import Accumulator
from anybatch.core.callbacks import OnUpdate, callbacks_of, tell
from anybatch.core.events import Clip, Observer, Step, Zero
from anybatch.core.find_nonfinite import find_culprit
from anybatch.core.fitting_parts import check_loss_parameters, check_parts
from anybatch.core.framework_wrappers import unwrapped_optimizer, unwrapped_scheduler
from anybatch.core.held_interrupts import HeldInterrupts
from anybatch.core.loss_scale import LossScale
from anybatch.core.low_precision import number_in
from anybatch.core.micro_batch_option import MicroBatch
from anybatch.core.nesting import Batch
from anybatch.core.norm_and_clip import clip_to_norm, clip_to_value, gradient_norm
from anybatch.core.objective import Coupled, Objective
from anybatch.core.option_types import Autocast, BatchNorm, Check, Offload, OnEmpty, OnNonFinite, Sums
from anybatch.core.options import Option, Running, check_of, in_a_line, says_what_to_write
from anybatch.core.out_of_memory import once_more
from anybatch.core.plugins import check_first_batch
from anybatch.core.precision import cast_gradients, takes_fp32_gradients
from anybatch.core.result import PENDING, FirstLook, UpdateResult
from anybatch.core.snapshot import Held, Slot
from anybatch.core.step import Stepping, change_gradients
from anybatch.core.telling import Events, events_for
from anybatch.errors import NonFiniteError

if TYPE_CHECKING:
    from anybatch.noise import NoiseHistory

NOT_MEASURED = "not measured: Update(..., noise=8) measures one update in 8"


class Update:
    """One batch, one update.

    `on_nonfinite` says what an inf or nan in the gradient does: `"raise"` names the parameter and the micro-batch, `"skip"`
    leaves the update out, `"drop"` leaves the bad micro-batch out and renormalises the rest, `"ignore"` does not look (and so
    never waits for the device). With a `scaler`, an overflow skips the update, as it is meant to, whatever `on_nonfinite`. A
    batch without any target is no update, unless `on_empty="step"`: then it steps with zeros, which decays weights.
    An optimizer or scheduler prepared by Accelerate is taken as the one inside it.
    `batch_norm`, `offload`, `reshard` and `prefetch` are those of `Accumulator`, and so is what it says of models on many
    ranks: the decisions of an update are taken by all ranks together. `running` gives the options as one value instead.

    `check` is what is looked at before anything is learnt from the first batch that is cut. `"first"`: whether the losses of a
    few rows add up, by forwards alone, for less than one micro-batch takes; `guard` tells what was found. Where they do not,
    `ExactnessError` names the cause, and nothing was changed. `"off"`: nothing. `verify` compares gradients. True and `"full"`
    are deprecated names of `"first"`.

    `noise=8` measures in one update of 8 how much the gradients of its micro-batches differ: `noise_scale` of a result says how
    large a batch has as much noise as signal. In those updates rows are cut as they came; gradients stay what they are.
    `sums="param"` adds gradients of bf16 and fp16 parameters up in their own dtype: half the memory, and an error.

    `on_update` is called with the result after each update that was applied, when the weights are new and the scheduler has
    moved: a function for a logger or an average of the weights, or a list of them. What one of them raises comes out; the
    update stays done.

    >>> import torch
    >>> from anybatch import supervised
    >>> model = nn.Linear(4, 2)
    >>> update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), supervised(nn.CrossEntropyLoss()), micro_batch=16)
    >>> result = update((torch.randn(40, 4), torch.randint(0, 2, (40,))))
    >>> result.micro_batches, result.units, result.applied
    (3, 40, True)
    """

    clip_norm = Option()
    clip_value = Option()
    on_nonfinite = Option()
    on_empty = Option()

    @says_what_to_write
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        objective: Objective | Coupled,
        *,
        micro_batch: MicroBatch,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        scaler: GradScaler | None = None,
        scheduler: LRScheduler | None = None,
        autocast: Autocast = None,
        batch_norm: BatchNorm | None = None,
        offload: Offload = "auto",
        on_nonfinite: OnNonFinite = "raise",
        on_empty: OnEmpty = "skip",
        reshard: bool = True,
        prefetch: bool = False,
        noise: int | None = None,
        sums: Sums = "fp32",
        check: Check | bool = "first",
        observer: Observer | None = None,
        on_update: OnUpdate = None,
        running: Running | None = None,
    ) -> None:
        optimizer, scheduler = unwrapped_optimizer(optimizer, scaler), unwrapped_scheduler(scheduler)
        check_parts(model, optimizer, scaler, scheduler)
        running = running or Running(
            autocast=autocast,
            batch_norm=batch_norm,
            offload=offload,
            reshard=reshard,
            prefetch=prefetch,
            on_nonfinite=on_nonfinite,
            on_empty=on_empty,
            clip_norm=clip_norm,
            clip_value=clip_value,
            noise=noise,
            sums=sums,
        )
        self.model = model
        self.optimizer = optimizer
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.scheduler = scheduler
        self.on_update = callbacks_of(on_update)
        self.accumulator = Accumulator(
            model,
            objective,
            micro_batch=micro_batch,
            parameters=self.parameters,
            keep_fp32=True,
            observer=observer,
            running=running,
            optimizer=optimizer,
        )
        self._scale = None if self.scaler is None else LossScale(self.scaler, optimizer)
        self._stepping = Stepping(optimizer)
        self._is_checked = check_of(check) == "off"
        self.guard = FirstLook(finding="off") if self._is_checked else PENDING
        """What the look at the first batch found."""
        self._is_first = True

    def __repr__(self) -> str:
        return in_a_line(self.accumulator, "Update", self.optimizer)

    @property
    def noise(self) -> "NoiseHistory | None":
        """The record of the noise of its gradients; None without `noise=`."""
        return self.accumulator.noise

    @property
    def running(self) -> Running:
        """The options of this update."""
        return self.accumulator.running

    @running.setter
    def running(self, running: Running) -> None:
        self.accumulator.running = running

    @property
    def observer(self) -> Observer | None:
        """Who is told of the stages of an update."""
        return self.accumulator.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self.accumulator.observer = observer

    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients this update clears and fills: the model's and the optimizer's."""
        return list(dict.fromkeys([*self.model.parameters(), *self._stepped()]))

    def __call__(self, batch: Batch) -> UpdateResult:
        """Learn from one batch: zero, accumulate, unscale, clip, step, schedule, each once.

        An exception before the step is done, whatever it is, leaves weights, optimizer, scheduler, scaler and buffers as they
        were; Ctrl-C in the step waits until all of it is done. An update that is not applied leaves them so too.
        """
        if self._is_first:
            self._begin()
        if not self._is_checked:
            self._look_at_first(batch)
        events = events_for(self.observer)
        before = self.accumulator.before_batch()
        buffers = before.buffers
        lr = _value(self.optimizer.param_groups[0].get("lr", float("nan")))
        is_applied = False
        try:
            self._zero(events)
            accumulated = self.accumulator.backward(batch, scaler=self.scaler, before=before)
            del before  # its random state need not lie beside the step
            stepped = self._stepped()
            is_learnable = accumulated.has_gradient and not (accumulated.is_empty and self.running.on_empty == "skip")
            if is_learnable and self._scale is not None:
                change_gradients(self._scale.unscale, "unscaled")
            grad_norm = once_more(lambda: gradient_norm(stepped))
            is_finite = is_learnable and self._is_finite(grad_norm)
            if is_learnable and not is_finite and self._raises():
                self.accumulator.forget_batch(buffers)  # buffers may hold the nan that is looked for
                raise NonFiniteError(self._explain(batch, grad_norm))
            if is_finite:
                self._clip(stepped, grad_norm, events)
            events.begin(Step)
            with HeldInterrupts():
                retries = accumulated.retries
                if is_finite:
                    retries += self._step(stepped)
                    is_applied = not getattr(self.optimizer, "step_was_skipped", False)
                if is_learnable and self._scale is not None:
                    self._scale.update(is_applied=is_finite)
                if is_applied and self.scheduler is not None:
                    self.scheduler.step()
            events.end(Step, applied=is_applied)
        finally:
            events.close()
            if not is_applied:
                self._forget(buffers)
        noise = self.accumulator.end_update(grad_norm, applied=is_applied)
        result = UpdateResult(
            loss=accumulated.loss,
            grad_norm=grad_norm,
            units=accumulated.units,
            micro_batches=accumulated.micro_batches,
            applied=is_applied,
            lr=lr,
            metrics=accumulated.metrics,
            dropped=accumulated.dropped,
            noise_scale=None if noise is None else noise.scale,
            noise_reason=NOT_MEASURED if noise is None else noise.reason,
            retries=retries,
        )
        return tell(self.on_update, result)

    def _begin(self) -> None:
        self._is_first = False
        check_loss_parameters(self.model, self.accumulator.objective, self._stepped())
        if self._scale is not None:
            self._scale.make(self._stepped()[0].device)

    def _forget(self, buffers: Mapping[Slot, Held]) -> None:
        """Undo what a batch changes beside gradients, because its update was not applied."""
        if self._scale is not None:
            self._scale.forget()
        self.accumulator.forget_batch(buffers)

    def _look_at_first(self, batch: Batch) -> None:
        self.guard = check_first_batch(self.accumulator, batch)
        self._is_checked = self.guard is not PENDING

    def _stepped(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _zero(self, events: Events) -> None:
        events.begin(Zero)
        parameters = self.parameters()
        for parameter in parameters:
            parameter.grad = None
        events.end(Zero, parameters=tuple(parameters))

    def _is_finite(self, grad_norm: Tensor) -> bool:
        if self.running.on_nonfinite == "ignore" and self.scaler is None:
            return True
        return math.isfinite(once_more(lambda: number_in(grad_norm)))

    def _raises(self) -> bool:
        """True where a gradient that is not finite is an error: with a scaler it is an overflow, as it is meant to be."""
        return self.running.on_nonfinite == "raise" and self.scaler is None

    def _clip(self, stepped: list[nn.Parameter], grad_norm: Tensor, events: Events) -> None:
        clip_norm, clip_value = self.running.clip_norm, self.running.clip_value
        if clip_norm is None and clip_value is None:
            return
        events.begin(Clip)
        if clip_norm is not None:
            change_gradients(lambda: clip_to_norm(stepped, clip_norm, grad_norm), "clipped")
        if clip_value is not None:
            once_more(lambda: clip_to_value(stepped, clip_value))  # clamping twice is clamping once
        events.end(Clip, grad_norm=grad_norm)

    def _step(self, stepped: list[nn.Parameter]) -> int:
        """The optimizer's step; how often memory ran out in it."""
        if not takes_fp32_gradients(self.optimizer):
            once_more(lambda: cast_gradients(stepped))
        return self._stepping.step(self.optimizer.step if self._scale is None else self._scale.step)

    def _explain(self, batch: Batch, grad_norm: Tensor) -> str:
        names = {parameter: f"optimizer parameter {index}" for index, parameter in enumerate(self._stepped())}
        names |= {parameter: name for name, parameter in self.model.named_parameters()}
        culprit = find_culprit(self.accumulator, batch, names)
        if culprit is None:
            where = (
                f"the norm of the gradient is {grad_norm.item()}, but no micro-batch shows it when run again alone: a "
                "random draw, such as dropout, or a sum that overflowed"
            )
        else:
            where = culprit.where()
        return (
            f"this update was not applied: {where}. Weights, optimizer and scheduler are as before. Look at those rows, or "
            "use on_nonfinite='skip' to leave such updates out, 'drop' to leave only such micro-batches out."
        )


def _value(lr: float | Tensor) -> float | Tensor:
    return lr.detach().clone() if isinstance(lr, Tensor) else lr
