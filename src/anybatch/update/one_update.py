"""The update in its one right order: zero, micro-batches, unscale, clip, step, scaler, scheduler."""

import math
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from anybatch.batches import Batch, MicroBatch
from anybatch.errors import MemoryLimitError, NonFiniteError, UpdateError
from anybatch.events import Clip, Events, Observer, Step, Zero, events_for
from anybatch.gradients import cast_gradients, clip_to_norm, clip_to_value, gradient_norm, takes_fp32_gradients
from anybatch.objectives import Coupled, Objective
from anybatch.options import Autocast, BatchNorm, Offload, OnNonFinite
from anybatch.passes import Accumulated, Accumulator, Option, Running, check_model, find_culprit
from anybatch.state import of_statistics, once_more, tracking_layers
from anybatch.update.loss_scale import LossScale, loss_scale
from anybatch.update.result import UpdateResult
from anybatch.update.stepping import Stepping


class Update:
    """One batch, one update.

    `on_nonfinite` says what an inf or nan in the gradient does: `"raise"` names the parameter and the micro-batch, `"skip"`
    leaves the update out, `"drop"` leaves the bad micro-batch out and renormalises the rest, `"ignore"` does not look (and so
    never waits for the device). With a `scaler`, an overflow skips the update, as it is meant to, whatever `on_nonfinite`.
    `batch_norm`, `offload` and `reshard` are those of `Accumulator`, and so is what it says of models on many ranks: the
    decisions of an update are taken by all ranks together. With `check`, some rows of the first batch run on a copy, in one
    go and accumulated, before anything is learnt; where their gradients differ, `ExactnessError` names the cause. `running`
    gives the options as one value instead.

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
        reshard: bool = True,
        check: bool = False,
        observer: Observer | None = None,
        running: Running | None = None,
    ) -> None:
        _check(model, optimizer, scaler, scheduler)
        running = running or Running(
            autocast=autocast,
            batch_norm=batch_norm,
            offload=offload,
            reshard=reshard,
            on_nonfinite=on_nonfinite,
            clip_norm=clip_norm,
            clip_value=clip_value,
        )
        self.model = model
        self.optimizer = optimizer
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.scheduler = scheduler
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
        self._scale: LossScale = loss_scale(self.scaler, optimizer)
        self._tracking_layers = tracking_layers(model)
        self._stepping = Stepping(optimizer)
        self._is_to_check = check

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

        An exception before the step leaves weights, optimizer, scheduler and running statistics as they were.
        """
        if self._is_to_check:
            self._check_first(batch)
        events = events_for(self.observer)
        statistics = once_more(lambda: of_statistics(self._tracking_layers))
        forget_batch = self.accumulator.before_batch()
        lr = _value(self.optimizer.param_groups[0].get("lr", float("nan")))
        is_applied = False
        try:
            self._zero(events)
            accumulated = self.accumulator.backward(batch, scaler=self.scaler)
            stepped = self._stepped()
            if accumulated.has_gradient:
                self._scale.unscale()
            grad_norm = once_more(lambda: gradient_norm(stepped))
            is_applied = accumulated.has_gradient and self._is_finite(grad_norm)
            if not is_applied and accumulated.has_gradient and self._raises():
                statistics.put_back()  # they may hold the nan that is looked for
                raise NonFiniteError(self._explain(batch, grad_norm))
            if is_applied:
                self._clip(stepped, grad_norm, events)
            retries = accumulated.retries + self._step(stepped, accumulated, is_applied, events)
        except MemoryLimitError:
            is_applied = False
            self._scale.forget()
            raise
        finally:
            events.close()
            if not is_applied:
                statistics.put_back()
                forget_batch()
        return UpdateResult(
            loss=accumulated.loss,
            grad_norm=grad_norm,
            units=accumulated.units,
            micro_batches=accumulated.micro_batches,
            applied=is_applied,
            lr=lr,
            metrics=accumulated.metrics,
            dropped=accumulated.dropped,
            retries=retries,
        )

    def _check_first(self, batch: Batch) -> None:
        from anybatch.proof import self_check  # the proof takes longer to load than all else, and is seldom asked for

        self_check(self.accumulator, batch)
        self._is_to_check = False

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
        return math.isfinite(grad_norm.item())

    def _raises(self) -> bool:
        """True where a gradient that is not finite is an error: with a scaler it is an overflow, as it is meant to be."""
        return self.running.on_nonfinite == "raise" and self.scaler is None

    def _clip(self, stepped: list[nn.Parameter], grad_norm: Tensor, events: Events) -> None:
        clip_norm, clip_value = self.running.clip_norm, self.running.clip_value
        if clip_norm is None and clip_value is None:
            return
        events.begin(Clip)
        if clip_norm is not None:
            clip_to_norm(stepped, clip_norm, grad_norm)
        if clip_value is not None:
            clip_to_value(stepped, clip_value)
        events.end(Clip, grad_norm=grad_norm)

    def _step(self, stepped: list[nn.Parameter], accumulated: Accumulated, is_applied: bool, events: Events) -> int:
        """The step, the scale and the schedule; how often memory ran out in it."""
        retries = 0
        events.begin(Step)
        if is_applied:
            if not takes_fp32_gradients(self.optimizer):
                once_more(lambda: cast_gradients(stepped))
            retries = self._stepping.step(self._scale.step)
        if accumulated.has_gradient:
            self._scale.update(is_applied=is_applied)
        if is_applied and self.scheduler is not None:
            self.scheduler.step()
        events.end(Step, applied=is_applied)
        return retries

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
            what = "the loss" if culprit.parameter is None else f"the gradient of {culprit.parameter!r}"
            whose = "" if culprit.rank is None else f" of rank {culprit.rank}"
            where = (
                f"{what} is not finite, first in micro-batch {culprit.micro_batch} of {culprit.num_micro_batches}{whose} "
                f"(counted from 0), whose loss is {culprit.loss:.6g}"
            )
        return (
            f"this update was not applied: {where}. Weights, optimizer and scheduler are as before. Look at those rows, or "
            "use on_nonfinite='skip' to leave such updates out, 'drop' to leave only such micro-batches out."
        )


def _value(lr: float | Tensor) -> float | Tensor:
    return lr.detach().clone() if isinstance(lr, Tensor) else lr


def _check(model: nn.Module, optimizer: Any, scaler: object, scheduler: object) -> None:
    check_model(model)
    if not hasattr(optimizer, "step") or not hasattr(optimizer, "param_groups"):
        raise UpdateError(f"optimizer={optimizer!r} is a {type(optimizer).__name__}; expected a torch.optim.Optimizer.")
    if isinstance(optimizer, LBFGS):
        raise UpdateError(
            "LBFGS evaluates the batch several times per step, through a closure. Use Accumulator: "
            "optimizer.step(closure), where closure() zeroes the gradients and returns accumulator.backward(batch).loss."
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UpdateError(
            "ReduceLROnPlateau steps on a validation loss, not once per update. Leave scheduler=None and call "
            "scheduler.step(validation_loss) yourself."
        )
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise UpdateError(f"scheduler={scheduler!r:.80}: expected one of torch.optim.lr_scheduler, or None.")
    if scaler is not None and not hasattr(scaler, "unscale_"):
        raise UpdateError(f"scaler={scaler!r:.80}: expected a torch.amp.GradScaler, or None.")
    own = set(model.parameters())
    if not any(parameter in own for group in optimizer.param_groups for parameter in group["params"]):
        raise UpdateError(
            f"the optimizer holds none of the parameters of this {type(model).__name__}, so no update could change it. Make "
            "the optimizer from model.parameters(), after the model got its final parameters."
        )
