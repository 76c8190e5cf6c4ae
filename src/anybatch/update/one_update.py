"""The update in its one right order: zero, micro-batches, unscale, clip, step, scaler, scheduler."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from anybatch.batches import Batch, MicroBatch
from anybatch.errors import MemoryLimitError, NonFiniteError, UpdateError
from anybatch.events import Clip, Observer, Step, Tracker, Zero, tracker_for
from anybatch.gradients import (
    cast_gradients,
    clip_to_norm,
    clip_to_value,
    found_overflow,
    gradient_norm,
    takes_fp32_gradients,
)
from anybatch.objectives import Coupled, Objective
from anybatch.passes import Accumulated, Accumulator, Autocast, BatchNorm, check_model, find_culprit
from anybatch.proof import self_check
from anybatch.state import Offload, copy_statistics, once_more, tracking_layers
from anybatch.update.stepping import Stepping

OnNonFinite = Literal["raise", "skip", "drop", "ignore"]
SMALLEST_SCALE = 2.0**-24
"""A loss scale below this has been halved some 36 times in a row: no overflow, but an inf or nan in the model itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """What one update did. Tensors are detached; reading one waits for the device, nothing else does."""

    loss: Tensor
    """The loss of the whole batch."""
    grad_norm: Tensor
    """The norm of the whole batch's gradient, unscaled, before clipping."""
    units: float
    """What the mean loss divided by: rows, target tokens, summed class weights."""
    micro_batches: int
    """How many micro-batches the batch was cut into."""
    applied: bool
    """False where the step was skipped: weights, optimizer and scheduler are as before, and the batch can be given again."""
    lr: float | Tensor
    """The learning rate of this update, of the first parameter group."""
    metrics: Mapping[str, Tensor]
    """The objective's metrics, for the whole batch."""
    dropped: tuple[int, ...] = ()
    """Numbers of the micro-batches that were not finite and left out (`on_nonfinite="drop"`)."""
    retries: int = 0
    """How often memory ran out: the batch was started again in smaller micro-batches, or the step was."""


class Update:
    """One batch, one update.

    `on_nonfinite` says what an inf or nan in the gradient does: `"raise"` names the parameter and the micro-batch, `"skip"`
    leaves the update out, `"drop"` leaves the bad micro-batch out and renormalises the rest, `"ignore"` does not look (and so
    never waits for the device). With a `scaler`, an overflow skips the update, as it is meant to, whatever `on_nonfinite`.
    `batch_norm`, `offload` and `reshard` are those of `Accumulator`, and so is what it says of models on many ranks: the
    decisions of an update are taken by all ranks together. With `check`, some rows of the first batch run on a copy, in one
    go and accumulated, before anything is learnt; where their gradients differ, `ExactnessError` names the cause.

    >>> import torch
    >>> from anybatch import supervised
    >>> model = nn.Linear(4, 2)
    >>> update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), supervised(nn.CrossEntropyLoss()), micro_batch=16)
    >>> result = update((torch.randn(40, 4), torch.randint(0, 2, (40,))))
    >>> result.micro_batches, result.units, result.applied
    (3, 40, True)
    """

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
    ) -> None:
        _check(model, optimizer, clip_norm, clip_value, scaler, scheduler, on_nonfinite)
        self.model = model
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self.clip_value = clip_value
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.scheduler = scheduler
        self.on_nonfinite = on_nonfinite
        self.observer = observer
        self.accumulator = Accumulator(
            model,
            objective,
            micro_batch=micro_batch,
            autocast=autocast,
            batch_norm=batch_norm,
            offload=offload,
            drop_nonfinite=on_nonfinite == "drop",
            parameters=self.parameters,
            keep_fp32=True,
            reshard=reshard,
            observer=observer,
        )
        clips = {"clip_norm": clip_norm, "clip_value": clip_value}
        workload = self.accumulator.workload
        self.accumulator.workload = replace(workload, optimizer=optimizer, options={**workload.options, **clips})
        self._tracking_layers = tracking_layers(model)
        self._stepping = Stepping(optimizer)
        self._is_to_check = check

    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients this update clears and fills: the model's and the optimizer's."""
        return list(dict.fromkeys([*self.model.parameters(), *self._stepped()]))

    def __call__(self, batch: Batch) -> UpdateResult:
        """Learn from one batch: zero, accumulate, unscale, clip, step, schedule, each once.

        An exception before the step leaves weights, optimizer, scheduler and running statistics as they were.
        """
        if self._is_to_check:
            self_check(self.accumulator, batch)
            self._is_to_check = False
        tracker = tracker_for(self.observer)
        statistics = once_more(lambda: copy_statistics(self._tracking_layers))
        lr = _value(self.optimizer.param_groups[0].get("lr", float("nan")))
        is_applied = False
        try:
            self._zero(tracker)
            accumulated = self.accumulator.backward(batch, scaler=self.scaler)
            stepped = self._stepped()
            if self.scaler is not None and accumulated.has_gradient:
                self.scaler.unscale_(self.optimizer)
            grad_norm = once_more(lambda: gradient_norm(stepped))
            is_applied = accumulated.has_gradient and self._is_finite(grad_norm)
            if not is_applied and accumulated.has_gradient and self.scaler is None and self.on_nonfinite == "raise":
                statistics.restore()  # they may hold the nan that is looked for
                raise NonFiniteError(self._explain(batch, grad_norm))
            if is_applied:
                self._clip(stepped, grad_norm, tracker)
            retries = accumulated.retries + self._step(stepped, accumulated, is_applied, tracker)
        except MemoryLimitError:
            is_applied = False
            if self.scaler is not None:
                # what was unscaled is not stepped: the next update unscales its own
                self.scaler._per_optimizer_states.pop(id(self.optimizer), None)
            raise
        finally:
            if tracker is not None:
                tracker.close()
            if not is_applied:
                statistics.restore()
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

    def _stepped(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _zero(self, tracker: Tracker | None) -> None:
        if tracker is not None:
            tracker.begin(Zero)
        parameters = self.parameters()
        for parameter in parameters:
            parameter.grad = None
        if tracker is not None:
            tracker.end(Zero, parameters=tuple(parameters))

    def _is_finite(self, grad_norm: Tensor) -> bool:
        if self.on_nonfinite == "ignore" and self.scaler is None:
            return True
        return math.isfinite(grad_norm.item())

    def _clip(self, stepped: list[nn.Parameter], grad_norm: Tensor, tracker: Tracker | None) -> None:
        if self.clip_norm is None and self.clip_value is None:
            return
        if tracker is not None:
            tracker.begin(Clip)
        if self.clip_norm is not None:
            clip_to_norm(stepped, self.clip_norm, grad_norm)
        if self.clip_value is not None:
            clip_to_value(stepped, self.clip_value)
        if tracker is not None:
            tracker.end(Clip, grad_norm=grad_norm)

    def _step(
        self, stepped: list[nn.Parameter], accumulated: Accumulated, is_applied: bool, tracker: Tracker | None
    ) -> int:
        """The step, the scale and the schedule; how often memory ran out in it."""
        retries = 0
        if tracker is not None:
            tracker.begin(Step)
        if is_applied:
            if not takes_fp32_gradients(self.optimizer):
                once_more(lambda: cast_gradients(stepped))
            scaler = self.scaler
            retries = self._stepping.step(
                self.optimizer.step if scaler is None else lambda: scaler.step(self.optimizer)
            )
        if self.scaler is not None and accumulated.has_gradient:
            if not is_applied:
                found_overflow(self.scaler, self.optimizer)
            self._update_scale(self.scaler, is_applied)
        if is_applied and self.scheduler is not None:
            self.scheduler.step()
        if tracker is not None:
            tracker.end(Step, applied=is_applied)
        return retries

    def _update_scale(self, scaler: GradScaler, is_applied: bool) -> None:
        scaler.update()
        if not is_applied and scaler.get_scale() < SMALLEST_SCALE:
            raise NonFiniteError(
                f"the loss scale has fallen to {scaler.get_scale():.3g} and the gradient is still not finite: this is no "
                "overflow, but an inf or nan in the data or the model. Run the batch without a scaler to see which "
                "parameter and micro-batch it comes from."
            )

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


def _check(
    model: nn.Module,
    optimizer: Any,
    clip_norm: float | None,
    clip_value: float | None,
    scaler: object,
    scheduler: object,
    on_nonfinite: str,
) -> None:
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
    if clip_norm is not None and clip_value is not None:
        raise UpdateError(f"clip_norm={clip_norm} and clip_value={clip_value} are both given; choose one.")
    for name, value in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        if value is not None and (not isinstance(value, int | float) or not value > 0):
            raise UpdateError(f"{name}={value!r}: expected a number above 0, or None for no clipping.")
    if on_nonfinite not in get_args(OnNonFinite):
        raise UpdateError(f"on_nonfinite={on_nonfinite!r}: expected one of {', '.join(get_args(OnNonFinite))}.")
    own = set(model.parameters())
    if not any(parameter in own for group in optimizer.param_groups for parameter in group["params"]):
        raise UpdateError(
            f"the optimizer holds none of the parameters of this {type(model).__name__}, so no update could change it. Make "
            "the optimizer from model.parameters(), after the model got its final parameters."
        )
