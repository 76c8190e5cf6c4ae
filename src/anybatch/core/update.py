"""`Update`: zero, accumulate, unscale, clip, step, schedule, each once per batch and in this order."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Unpack

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from anybatch.core.accumulator import Accumulator, check_model
from anybatch.core.batch import Batch
from anybatch.core.events import Clip, Events, Observer, Step, Zero, events_for
from anybatch.core.gradients import (
    GradientSum,
    all_finite,
    cast_gradients,
    clip_to_norm,
    clip_to_value,
    gradient_norm,
    takes_fp32_gradients,
)
from anybatch.core.hooks import NOTHING
from anybatch.core.objective import Coupled, Objective
from anybatch.core.options import (
    Autocast,
    BatchNorm,
    Check,
    MoreOptions,
    OnNonFinite,
    Option,
    UpdateOptions,
    check_of,
    checks_arguments,
    options_of,
    repr_of,
)
from anybatch.core.out_of_memory import once_more
from anybatch.core.plugins import check_first_batch
from anybatch.core.schedules import OneByOne
from anybatch.core.splits import MicroBatch
from anybatch.core.step import HeldInterrupts, LossScale, Stepping, change_gradients
from anybatch.core.torch_private import number_in
from anybatch.display import facts_table, html_block, one_line
from anybatch.errors import NonFiniteError, UpdateError

if TYPE_CHECKING:
    from anybatch.noise import NoiseHistory, NoiseScale

NOT_MEASURED = "not measured: Update(..., noise=8) measures one update in 8"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """Result of one update. Tensors are detached; reading one waits for the device, nothing else does."""

    loss: Tensor
    """Loss of the whole batch."""
    grad_norm: Tensor
    """Norm of the whole batch's gradient, unscaled, before clipping."""
    units: float
    """Number that the mean loss divides by: rows, target tokens, summed class weights."""
    micro_batches: int
    """Number of micro-batches."""
    applied: bool
    """False if the step was skipped: weights, optimizer and scheduler are as before, and the batch can be given again."""
    lr: float | Tensor
    """Learning rate of this update, of the first parameter group."""
    metrics: Mapping[str, Tensor]
    """Metrics of the objective, for the whole batch."""
    dropped: tuple[int, ...] = ()
    """Numbers of the micro-batches that were left out because they were not finite (`on_nonfinite="drop"`)."""
    noise_scale: "NoiseScale | None" = None
    """Batch size, in rows, at which the gradient has as much noise as signal, from the latest measured updates (`noise=`)."""
    noise_reason: str | None = field(default=None, repr=False)
    """Reason why `noise_scale` is None."""
    retries: int = 0
    """Number of out-of-memory errors after which the batch ran again in smaller micro-batches, or the step did."""

    __repr__ = one_line

    def scalars(self) -> dict[str, float]:
        """Return the numbers for a logger, read from the device.

        Returns:
            Loss, gradient norm, learning rate, units, micro-batches and every metric of one number, as Python floats.

        Example:
            >>> import torch
            >>> tensors = {"loss": torch.tensor(2.0), "grad_norm": torch.tensor(1.0)}
            >>> result = UpdateResult(**tensors, metrics={}, units=8, micro_batches=2, applied=True, lr=0.25)
            >>> result.scalars()
            {'loss': 2.0, 'grad_norm': 1.0, 'lr': 0.25, 'units': 8.0, 'micro_batches': 2.0}
        """
        numbers = {name: metric for name, metric in self.metrics.items() if metric.numel() == 1}
        own = {name: getattr(self, name) for name in ("loss", "grad_norm", "lr", "units", "micro_batches")}
        return {name: float(value) for name, value in (own | numbers).items()}

    def _repr_html_(self) -> str:
        title = "One update" if self.applied else "One update, not applied: the weights are as before"
        return html_block(title, facts_table(self.scalars()))


Finding = Literal["pending", "off", "passed", "not judged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstBatchCheck:
    """Result of the check of the first batch (`update.guard`). A loss that does not add up raises `ExactnessError` instead."""

    finding: Finding
    """`"pending"` until a batch is cut, `"passed"`, `"not judged"`, or `"off"`."""
    error: float | None = None
    """Relative difference between the loss of the whole and the sum of the parts' losses."""
    reason: str = ""
    """Reason for "not judged"; after "passed", the state outside of the model that its forwards changed."""


PENDING = FirstBatchCheck(finding="pending")

UpdateCallback = Callable[[UpdateResult], object]
OnUpdate = UpdateCallback | Iterable[UpdateCallback] | None
"""Callbacks that get the result, in order; their return values are ignored."""


class Update:
    """One optimizer update per batch, with exactly that batch's gradient.

    Each call is equivalent to this program on the whole batch, in the memory of one micro-batch:

        optimizer.zero_grad()
        objective.loss(model, batch).backward()
        clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        scheduler.step()

    If memory runs out, the batch runs again in smaller micro-batches. On several ranks (`DistributedDataParallel`,
    `fully_shard`) the batch is the rows of all ranks together. An optimizer or scheduler that Accelerate or Lightning wrapped
    is unwrapped.

    Args:
        model: A module, plain, compiled, in `DistributedDataParallel` or sharded by `fully_shard`.
        optimizer: A torch optimizer that holds the model's parameters, and those of the loss if it has any.
        objective: The loss and the units it averages over: `supervised(criterion)`, `huggingface()`, `Objective(loss, units)`
            or `Coupled(encode, loss)`.
        micro_batch: The rows that one forward and backward holds in memory: a number of rows, a split such as `Rows(16)`,
            `Tokens(8192)` or `Fit("6GiB")`, or "auto" for the fastest size that fits.
        clip_norm: Largest norm of the gradient of the whole batch.
        scheduler: A learning-rate scheduler, stepped once after each update that was applied.
        scaler: A `torch.amp.GradScaler`. An overflow skips the update, whatever `on_nonfinite` says.
        autocast: A dtype to autocast the forward to, such as torch.bfloat16, or a `torch.autocast(...)` context.
        batch_norm: Statistics of BatchNorm layers: "exact", "micro" or "frozen"; see `UpdateOptions`.
        on_nonfinite: Policy for an inf or nan in the gradient: "raise" (the default), "skip", "drop" or "ignore".
        check: "first" checks, before the first update of a batch that is cut, that the losses of a few rows add up; `guard`
            holds the result. "off" does not. `verify` compares gradients.
        on_update: A function, or a list of them, called with the result after each update that was applied.
        options: All options as one value; single keywords win. The rarer options (`clip_value`, `offload`, `on_empty`,
            `reshard`, `prefetch`, `noise`, `sums`) can also be given as keywords, and so can `observer`, a function that is
            called with each stage of an update (`anybatch.stages`).

    Raises:
        ArgumentsError: If an argument is missing or unknown.
        UpdateError: If the parts do not belong together, such as an optimizer without the model's parameters.
        LossError: If `objective` is not an objective.

    Example:
        >>> import torch
        >>> from anybatch import supervised
        >>> model = nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> update = Update(model, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=16)
        >>> result = update((torch.randn(40, 4), torch.randint(0, 2, (40,))))
        >>> result.micro_batches, result.units, result.applied
        (3, 40, True)
    """

    clip_norm = Option()
    clip_value = Option()
    on_nonfinite = Option()
    on_empty = Option()

    @checks_arguments
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        objective: Objective | Coupled,
        *,
        micro_batch: MicroBatch,
        clip_norm: float | None = None,
        scheduler: LRScheduler | None = None,
        scaler: GradScaler | None = None,
        autocast: Autocast = None,
        batch_norm: BatchNorm | None = None,
        on_nonfinite: OnNonFinite | None = None,
        check: Check | Literal["full"] | bool = "first",
        on_update: "OnUpdate" = None,
        options: UpdateOptions | None = None,
        **more: Unpack[MoreOptions],
    ) -> None:
        check_wrapped_scaler(optimizer, scaler)
        optimizer, scheduler = unwrapped(optimizer), unwrapped(scheduler)
        check_parts(model, optimizer, scaler, scheduler)
        spelled = {"clip_norm": clip_norm, "autocast": autocast, "batch_norm": batch_norm, "on_nonfinite": on_nonfinite}
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
            observer=more.get("observer"),
            options=options_of(options, spelled, more),
            optimizer=optimizer,
        )
        self._scale = None if self.scaler is None else LossScale(self.scaler, optimizer)
        self._stepping = Stepping(optimizer)
        self._is_checked = check_of(check) == "off"
        self.guard = FirstBatchCheck(finding="off") if self._is_checked else PENDING
        """Result of the check of the first batch."""
        self._is_first = True

    def __repr__(self) -> str:
        return repr_of(self.accumulator, "Update", self.optimizer)

    @property
    def noise(self) -> "NoiseHistory | None":
        """Record of the gradient noise; None without `noise=`."""
        return self.accumulator.noise

    @property
    def options(self) -> UpdateOptions:
        """Options of this update, as one value."""
        return self.accumulator.options

    @options.setter
    def options(self, options: UpdateOptions) -> None:
        self.accumulator.options = options

    running = options

    @property
    def observer(self) -> Observer | None:
        """Function that is called with each stage of an update."""
        return self.accumulator.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self.accumulator.observer = observer

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that this update zeroes: the model's and the optimizer's."""
        return list(dict.fromkeys([*self.model.parameters(), *self._stepped()]))

    def __call__(self, batch: Batch) -> UpdateResult:
        """Run one update: zero, accumulate, unscale, clip, step, schedule.

        An exception before the optimizer's step leaves weights, optimizer, scheduler, scaler and buffers as they were, and so
        does an update that is not applied. Ctrl-C in the step takes effect after the step.

        Args:
            batch: Any nesting of tensors that share their first dimension, or `MicroBatches`. Micro-batches are moved to the
                model's device one at a time.

        Returns:
            Loss, gradient norm, units and metrics of the whole batch, and whether the step was applied.

        Raises:
            BatchError: If the rows of the batch cannot be counted.
            ExactnessError: If the loss of the whole batch is not the weighted mean of its parts.
            NonFiniteError: If the gradient is not finite and `on_nonfinite` is "raise".
            MemoryLimitError: If memory runs out with a single row per micro-batch, or in the step.
        """
        if self._is_first or not self._is_checked:
            self._begin(batch)
        accumulator, options = self.accumulator, self.accumulator.options
        events = events_for(accumulator.observer)
        before = accumulator.before_batch()
        buffers = before.buffers
        lr = self.optimizer.param_groups[0].get("lr", float("nan"))
        lr = lr.detach().clone() if isinstance(lr, Tensor) else lr
        is_applied = False
        try:
            self._zero(events)
            accumulated = accumulator.backward(batch, scaler=self.scaler, before=before)
            del before  # frees its copy of the random state before the step
            retries = accumulated.retries
            stepped = self._stepped()
            is_learnable = accumulated.has_gradient and not (accumulated.is_empty and options.on_empty == "skip")
            if is_learnable and self._scale is not None:
                change_gradients(self._scale.unscale, "unscaled")
            grad_norm = once_more(lambda: gradient_norm(stepped))
            is_finite = is_learnable and self._is_finite(grad_norm)
            # with a scaler, a gradient that is not finite is an overflow, which skips the update
            if is_learnable and not is_finite and options.on_nonfinite == "raise" and self.scaler is None:
                accumulator.forget_batch(buffers)  # the search must not start from buffers that hold nan
                raise NonFiniteError(self._explain(batch, grad_norm))
            if is_finite:
                self._clip(stepped, grad_norm, events)
            events.begin(Step)
            with HeldInterrupts():
                if is_finite:
                    retries += self._step(stepped)
                    is_applied = not getattr(self.optimizer, "step_was_skipped", False)
                self._follow_step(is_learnable=is_learnable, is_finite=is_finite, is_applied=is_applied)
            events.end(Step, applied=is_applied)
        finally:
            events.close()
            if not is_applied:
                if self._scale is not None:
                    self._scale.forget()
                accumulator.forget_batch(buffers)
        noise = accumulator.noise
        if noise is not None:
            noise.add(grad_norm, applied=is_applied)
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
        for callback in self.on_update if is_applied else ():
            callback(result)
        return result

    def _begin(self, batch: Batch) -> None:
        """Check the loss's parameters before the first batch, and its values before the first batch that is cut."""
        if self._is_first:
            self._is_first = False
            check_loss_parameters(self.model, self.accumulator.objective, self._stepped())
            if self._scale is not None:
                self._scale.make(self._stepped()[0].device)
        if not self._is_checked:
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
        if self.options.on_nonfinite == "ignore" and self.scaler is None:
            return True
        return math.isfinite(once_more(lambda: number_in(grad_norm)))

    def _clip(self, stepped: list[nn.Parameter], grad_norm: Tensor, events: Events) -> None:
        clip_norm, clip_value = self.options.clip_norm, self.options.clip_value
        if clip_norm is None and clip_value is None:
            return
        events.begin(Clip)
        if clip_norm is not None:
            change_gradients(lambda: clip_to_norm(stepped, clip_norm, grad_norm), "clipped")
        if clip_value is not None:
            once_more(lambda: clip_to_value(stepped, clip_value))  # idempotent, so it can be repeated
        events.end(Clip, grad_norm=grad_norm)

    def _step(self, stepped: list[nn.Parameter]) -> int:
        """Step the optimizer; return how often memory ran out in it."""
        if not takes_fp32_gradients(self.optimizer):
            once_more(lambda: cast_gradients(stepped))
        return self._stepping.step(self.optimizer.step if self._scale is None else self._scale.step)

    def _follow_step(self, *, is_learnable: bool, is_finite: bool, is_applied: bool) -> None:
        """Update the loss scale and the learning rate."""
        if is_learnable and self._scale is not None:
            self._scale.update(is_applied=is_finite)
        if is_applied and self.scheduler is not None:
            self.scheduler.step()

    def _explain(self, batch: Batch, grad_norm: Tensor) -> str:
        names = {parameter: f"optimizer parameter {index}" for index, parameter in enumerate(self._stepped())}
        names |= {parameter: name for name, parameter in self.model.named_parameters()}
        where = find_nonfinite(self.accumulator, batch, names) or (
            f"the norm of the gradient is {grad_norm.item()}, but no micro-batch shows it when run again alone: a "
            "random draw, such as dropout, or a sum that overflowed"
        )
        return (
            f"this update was not applied: {where}. Weights, optimizer and scheduler are as before. Look at those rows, or "
            "use on_nonfinite='skip' to leave such updates out, 'drop' to leave only such micro-batches out."
        )


def callbacks_of(on_update: OnUpdate) -> tuple[UpdateCallback, ...]:
    """Return the callbacks as a tuple, each checked to be callable.

    >>> callbacks_of(None), callbacks_of(print) == callbacks_of([print])
    ((), True)
    """
    is_several = isinstance(on_update, Iterable) and not callable(on_update)
    given: tuple[Any, ...] = () if on_update is None else tuple(on_update) if is_several else (on_update,)  # type: ignore
    for each in given:
        if not callable(each):
            raise UpdateError(
                f"on_update={each!r:.80} is a {type(each).__name__}; expected a function of the result, such as "
                "lambda result: run.log(result.scalars()), or a list of such functions."
            )
    return given


def check_parts(model: nn.Module, optimizer: Any, scaler: object, scheduler: object) -> None:
    """Refuse arguments of a wrong type, and an optimizer of another model."""
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


def check_loss_parameters(model: nn.Module, objective: Objective | Coupled, stepped: Collection[nn.Parameter]) -> None:
    """Refuse a loss with a parameter that requires a gradient and is not in the optimizer."""
    held = {*model.parameters(), *stepped}
    named = objective.loss.named_parameters() if isinstance(objective.loss, nn.Module) else ()
    names = {parameter: name for name, parameter in named}
    for parameter in objective.parameters():
        if parameter.requires_grad and parameter not in held:
            raise UpdateError(
                f"the loss has a learned parameter, {names.get(parameter, '')!r} of shape {tuple(parameter.shape)}, that the "
                "optimizer does not hold: it would never move, and its gradient would grow from batch to batch. Give it to the "
                "optimizer, AdamW([*model.parameters(), *objective.parameters()]), or freeze it: info_nce(learned=False), "
                "requires_grad_(False)."
            )


_WRAPPERS = {
    "AcceleratedOptimizer": "optimizer",
    "LightningOptimizer": "optimizer",
    "_FabricOptimizer": "optimizer",
    "AcceleratedScheduler": "scheduler",
}
"""Attribute that holds the torch object, by class name, because these frameworks are not imported.

They step only when their framework's own counter of micro-batches says so; Accelerate's scheduler steps once per process.
"""
_REFUSED = {"DeepSpeedOptimizerWrapper", "DeepSpeedSchedulerWrapper", "DeepSpeedEngine"}


def unwrapped(part: Any) -> Any:
    """Return the torch optimizer or scheduler inside the wrappers of a framework."""
    while True:
        names = [base.__name__ for base in type(part).__mro__]
        if not _REFUSED.isdisjoint(names):
            raise UpdateError(
                f"{type(part).__name__} steps when DeepSpeed's engine says so, which accumulates by itself: updates in between "
                "would do nothing. Give Update a plain torch model and optimizer: "
                "Update(model, torch.optim.AdamW(model.parameters()), ...)."
            )
        attribute = next((_WRAPPERS[name] for name in names if name in _WRAPPERS), None)
        if attribute is None:
            return part
        part = getattr(part, attribute)


def check_wrapped_scaler(optimizer: Any, scaler: GradScaler | None) -> None:
    """Refuse a wrapper that scales the loss by itself, if `Update` does not get its scaler."""
    if unwrapped(optimizer) is not optimizer and getattr(optimizer, "scaler", None) is not None and scaler is None:
        raise UpdateError(
            f"this {type(optimizer).__name__} scales its loss (mixed_precision='fp16'), and an update has to unscale once, "
            "after the last micro-batch. Give the scale to Update too: Update(..., scaler=accelerator.scaler)."
        )


def find_nonfinite(accumulator: Accumulator, batch: Batch, names: Mapping[nn.Parameter, str]) -> str | None:
    """Run each micro-batch again, alone, and name the first that is not finite, in words; None if all are.

    `.grad` is restored. All ranks take part and return the same. A coupled loss is computed over the rows of each micro-batch.
    """
    plan, _, tools = accumulator.prepare(batch, given=OneByOne(accumulator.objective.whole()))
    gradients = GradientSum(names)
    # sharded gradients are complete only after they are reduced over ranks
    is_sharded = accumulator.parallelism.needs_equal_passes
    found: tuple[int, bool, str] | None = None
    with gradients.undone(), NOTHING if accumulator.norms is None else accumulator.norms.alone():
        for one in plan.passes:
            with tools.sync.around_pass(is_last=is_sharded):
                root, *_ = tools.loss_of(plan, one)
                root.backward()
            loss = root.detach().item()
            bad = next((name for parameter, name in names.items() if not all_finite([parameter.grad])), None)
            if found is None and one.reports and (bad is not None or not math.isfinite(loss)):
                what = "the loss" if bad is None else f"the gradient of {bad!r}"
                # a reduced gradient does not tell which rank's rows made it so
                is_rank_known = tools.ranks.size > 1 and not (is_sharded and math.isfinite(loss))
                rank = f" of rank {tools.ranks.rank}" if is_rank_known else ""
                where = (
                    f"{what} is not finite, first in micro-batch {one.micro_batch} of {plan.num_own}{rank} "
                    f"(counted from 0), whose loss is {loss:.6g}"
                )
                found = one.micro_batch, not is_rank_known, where
            if found is not None and not is_sharded:
                break
            gradients.zero()
    tools.sync.reset()  # these gradients are not reduced over ranks
    every = [one for one in tools.ranks.gather_objects(found) if one is not None]
    return min(every, key=lambda one: one[:2])[2] if every else None
