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
from anybatch.core.engine import Tools
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
from anybatch.core.plan import BatchPlan, Pass
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
    noise_scale: "NoiseScale | None" = None
    """How large a batch would have as much noise as signal, in rows, from the latest measured updates (`noise=`)."""
    noise_reason: str | None = field(default=None, repr=False)
    """Why there is no noise scale."""
    retries: int = 0
    """How often memory ran out: the batch was started again in smaller micro-batches, or the step was."""

    __repr__ = one_line

    def scalars(self) -> dict[str, float]:
        """What a logger takes, as Python numbers; metrics of more than one number are left out. It waits for the device once.

        >>> import torch
        >>> told = {"loss": torch.tensor(2.0), "grad_norm": torch.tensor(1.0), "metrics": {"accuracy": torch.tensor(0.5)}}
        >>> UpdateResult(**told, units=8, micro_batches=2, applied=True, lr=0.25).scalars()
        {'loss': 2.0, 'grad_norm': 1.0, 'lr': 0.25, 'units': 8.0, 'micro_batches': 2.0, 'accuracy': 0.5}
        """
        numbers = {name: metric for name, metric in self.metrics.items() if metric.numel() == 1}
        own = {name: getattr(self, name) for name in ("loss", "grad_norm", "lr", "units", "micro_batches")}
        return {name: float(value) for name, value in (own | numbers).items()}

    def _repr_html_(self) -> str:
        is_applied = "One update" if self.applied else "One update, not applied: the weights are as before"
        return html_block(is_applied, facts_table(self.scalars()))


Finding = Literal["pending", "off", "passed", "not judged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstBatchCheck:
    """Result of the check of the first batch: `update.guard`. A loss that does not add up is an error, and is not told here."""

    finding: Finding
    """`"pending"` until a batch is cut, `"passed"`, `"not judged"`, or `"off"`."""
    error: float | None = None
    """How far the losses of the parts were from that of the whole, as a part of it."""
    reason: str = ""
    """Why it could not be judged; of one that passed, what its forwards changed outside of the model."""


PENDING = FirstBatchCheck(finding="pending")


UpdateCallback = Callable[[UpdateResult], object]
OnUpdate = UpdateCallback | Iterable[UpdateCallback] | None
"""One function of the result, or several in the order in which they are called; None for none. What they return is left."""


class Update:
    """One optimizer update per batch, with exactly that batch's gradient.

    Each call is equivalent to this program on the whole batch, in the memory of one micro-batch:

        optimizer.zero_grad()
        objective.loss(model, batch).backward()
        clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        scheduler.step()

    On several ranks (`DistributedDataParallel`, `fully_shard`) the batch is what all ranks give together, and they take every
    decision together. An optimizer or scheduler prepared by Accelerate is taken as the one inside it.

    Args:
        model: The model, plain, compiled, in `DistributedDataParallel` or sharded by `fully_shard`.
        optimizer: A torch optimizer that holds the model's parameters, and those of the loss if it has any.
        objective: The loss and what it averages over: `supervised(criterion)`, `huggingface()`, `Objective(loss, units)` or
            `Coupled(encode, loss)`.
        micro_batch: What one forward and backward holds in memory: a number of rows, a split such as `Rows(16)`,
            `Tokens(8192)` or `Fit("6GiB")`, or "auto" for the fastest that fits.
        clip_norm: Clip the gradient of the whole batch to this norm.
        scheduler: A learning-rate scheduler, stepped once after each update that was applied.
        scaler: A `torch.amp.GradScaler`. An overflow skips the update, whatever `on_nonfinite` says.
        autocast: A dtype to autocast the forward to, such as torch.bfloat16, or a `torch.autocast` of your own.
        batch_norm: What BatchNorm layers see: "exact", "micro" or "frozen"; see `UpdateOptions`.
        on_nonfinite: What an inf or nan in the gradient does: "raise" (the default), "skip", "drop" or "ignore".
        check: "first" checks, before anything is learnt from the first batch that is cut, that the losses of a few rows add
            up; `guard` has the result. "off" does not. `verify` compares gradients.
        on_update: A function, or a list of them, called with the result after each update that was applied.
        options: All options as one value; keywords that are given win. The rarer ones (`clip_value`, `offload`, `on_empty`,
            `reshard`, `prefetch`, `noise`, `sums`) may be given as keywords too.

    Raises:
        ExactnessError: If the loss of the whole batch is not the weighted mean of its parts. Nothing was changed.
        NonFiniteError: If the gradient is not finite and `on_nonfinite` is "raise". Nothing was changed.

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
        optimizer, scheduler = unwrapped_optimizer(optimizer, scaler), unwrapped_scheduler(scheduler)
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
        """The result of the check of the first batch."""
        self._is_first = True

    def __repr__(self) -> str:
        return repr_of(self.accumulator, "Update", self.optimizer)

    @property
    def noise(self) -> "NoiseHistory | None":
        """The record of gradient noise; None without `noise=`."""
        return self.accumulator.noise

    @property
    def options(self) -> UpdateOptions:
        """The options of this update, as one value."""
        return self.accumulator.options

    @options.setter
    def options(self, options: UpdateOptions) -> None:
        self.accumulator.options = options

    running = options

    @property
    def observer(self) -> Observer | None:
        """The function that is called with the stages of an update."""
        return self.accumulator.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self.accumulator.observer = observer

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients this update clears and fills: the model's and the optimizer's."""
        stepped = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return list(dict.fromkeys([*self.model.parameters(), *stepped]))

    def __call__(self, batch: Batch) -> UpdateResult:
        """Learn from one batch.

        An exception before the step is done leaves weights, optimizer, scheduler, scaler and buffers as they were; Ctrl-C in
        the step waits until all of it is done. An update that is not applied leaves them so too.

        Args:
            batch: Any nesting of tensors that share their first dimension, or `MicroBatches`.

        Returns:
            The loss, gradient norm, units and metrics of the whole batch, and whether the step was applied.
        """
        if self._is_first or not self._is_checked:
            self._begin(batch)
        accumulator = self.accumulator
        events = events_for(accumulator.observer)
        before = accumulator.before_batch()
        buffers = before.buffers
        lr = self.optimizer.param_groups[0].get("lr", float("nan"))
        lr = lr.detach().clone() if isinstance(lr, Tensor) else lr
        is_applied = False
        try:
            self._zero(events)
            accumulated = accumulator.backward(batch, scaler=self.scaler, before=before)
            del before  # its random state need not lie beside the step
            retries = accumulated.retries
            stepped = self._stepped()
            is_learnable = accumulated.has_gradient and not (accumulated.is_empty and self.options.on_empty == "skip")
            if is_learnable and self._scale is not None:
                change_gradients(self._scale.unscale, "unscaled")
            grad_norm = once_more(lambda: gradient_norm(stepped))
            is_finite = is_learnable and self._is_finite(grad_norm)
            if is_learnable and not is_finite and self._raises():
                accumulator.forget_batch(buffers)  # buffers may hold the nan that is looked for
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
                self._forget(buffers)
        noise = accumulator.end_update(grad_norm, applied=is_applied)
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
        """Check the parts before the first batch, and the loss before the first batch that is cut."""
        if self._is_first:
            self._is_first = False
            check_loss_parameters(self.model, self.accumulator.objective, self._stepped())
            if self._scale is not None:
                self._scale.make(self._stepped()[0].device)
        if not self._is_checked:
            self.guard = check_first_batch(self.accumulator, batch)
            self._is_checked = self.guard is not PENDING

    def _forget(self, buffers: Mapping[Any, Any]) -> None:
        """Undo what a batch changes beside gradients, because its update was not applied."""
        if self._scale is not None:
            self._scale.forget()
        self.accumulator.forget_batch(buffers)

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

    def _raises(self) -> bool:
        """True if a gradient that is not finite is an error. With a scaler it is an overflow, which is none."""
        return self.options.on_nonfinite == "raise" and self.scaler is None

    def _clip(self, stepped: list[nn.Parameter], grad_norm: Tensor, events: Events) -> None:
        clip_norm, clip_value = self.options.clip_norm, self.options.clip_value
        if clip_norm is None and clip_value is None:
            return
        events.begin(Clip)
        if clip_norm is not None:
            change_gradients(lambda: clip_to_norm(stepped, clip_norm, grad_norm), "clipped")
        if clip_value is not None:
            once_more(lambda: clip_to_value(stepped, clip_value))  # clamping twice is clamping once
        events.end(Clip, grad_norm=grad_norm)

    def _step(self, stepped: list[nn.Parameter]) -> int:
        """Step the optimizer; return how often memory ran out in it."""
        if not takes_fp32_gradients(self.optimizer):
            once_more(lambda: cast_gradients(stepped))
        return self._stepping.step(self.optimizer.step if self._scale is None else self._scale.step)

    def _follow_step(self, *, is_learnable: bool, is_finite: bool, is_applied: bool) -> None:
        """Move the loss scale and the learning rate."""
        if is_learnable and self._scale is not None:
            self._scale.update(is_applied=is_finite)
        if is_applied and self.scheduler is not None:
            self.scheduler.step()

    def _explain(self, batch: Batch, grad_norm: Tensor) -> str:
        names = {parameter: f"optimizer parameter {index}" for index, parameter in enumerate(self._stepped())}
        names |= {parameter: name for name, parameter in self.model.named_parameters()}
        found = find_nonfinite(self.accumulator, batch, names)
        where = (
            f"the norm of the gradient is {grad_norm.item()}, but no micro-batch shows it when run again alone: a "
            "random draw, such as dropout, or a sum that overflowed"
            if found is None
            else found.where()
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
    """Refuse what is no optimizer, scaler or scheduler, or does not belong to the model."""
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
    """Refuse a loss with a parameter that gets gradients and never moves, because the optimizer does not hold it."""
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


OPTIMIZERS = {"AcceleratedOptimizer": "optimizer", "LightningOptimizer": "optimizer", "_FabricOptimizer": "optimizer"}
"""By class, where the optimizer is. They step only when their framework's own counter of micro-batches says so."""
SCHEDULERS = {"AcceleratedScheduler": "scheduler"}
"""By class, where the scheduler is. Accelerate's steps once per process, and not where it thinks that a step was skipped."""
REFUSED = ("DeepSpeedOptimizerWrapper", "DeepSpeedSchedulerWrapper", "DeepSpeedEngine")
"""Their step belongs to an engine that accumulates by itself."""


def unwrapped_optimizer(optimizer: Any, scaler: GradScaler | None) -> Any:
    """The optimizer itself. Accelerate's may hold a loss scale, which the update has to know of."""
    own_scaler = getattr(optimizer, "scaler", None) if _kind(optimizer, OPTIMIZERS) else None
    if own_scaler is not None and scaler is None:
        raise UpdateError(
            f"this {type(optimizer).__name__} scales its loss (mixed_precision='fp16'), and an update has to unscale once, "
            "after the last micro-batch. Give the scale to Update too: Update(..., scaler=accelerator.scaler)."
        )
    return _inside(optimizer, OPTIMIZERS)


def unwrapped_scheduler(scheduler: Any) -> Any:
    """The scheduler itself, which an update steps once, however many processes there are."""
    return _inside(scheduler, SCHEDULERS)


def _inside(wrapped: Any, known: dict[str, str]) -> Any:
    _check(wrapped)
    while (kind := _kind(wrapped, known)) is not None:
        wrapped = getattr(wrapped, known[kind])
        _check(wrapped)
    return wrapped


def _kind(thing: Any, known: dict[str, str]) -> str | None:
    """Which of the known classes this is, or is derived from; by name, because none of the frameworks is imported here."""
    return next((base.__name__ for base in type(thing).__mro__ if base.__name__ in known), None)


def _check(thing: Any) -> None:
    if any(base.__name__ in REFUSED for base in type(thing).__mro__):
        raise UpdateError(
            f"{type(thing).__name__} steps when DeepSpeed's engine says so, which accumulates by itself: updates in between "
            "would do nothing. Give Update a plain torch model and optimizer: "
            "Update(model, torch.optim.AdamW(model.parameters()), ...)."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """The first micro-batch whose loss or gradient is not finite, seen when each was run again alone."""

    micro_batch: int
    num_micro_batches: int
    loss: float
    parameter: str | None
    """The first parameter with a gradient that is not finite; None where the gradients are finite and the loss is not."""
    rank: int | None = None
    """Whose micro-batch it is; None in one process, and where the gradient of all ranks' micro-batches shows it alone."""

    def where(self) -> str:
        """What is not finite, and where it was first seen, in words."""
        what = "the loss" if self.parameter is None else f"the gradient of {self.parameter!r}"
        whose = "" if self.rank is None else f" of rank {self.rank}"
        return (
            f"{what} is not finite, first in micro-batch {self.micro_batch} of {self.num_micro_batches}{whose} "
            f"(counted from 0), whose loss is {self.loss:.6g}"
        )


def find_nonfinite(accumulator: Accumulator, batch: Batch, names: Mapping[nn.Parameter, str]) -> NonFinite | None:
    """Run each micro-batch again, alone, until one is not finite; None if all are (a random draw, a sum that overflowed).

    `.grad` is left alone. Ranks look together, and all get the same answer. A coupled loss is computed of the rows of each
    micro-batch by themselves.
    """
    plan, _, tools = accumulator.prepare(batch, given=OneByOne(accumulator.objective.whole()))
    gradients = GradientSum(names)
    # sharded gradients can be seen only when they are synchronised, by all ranks at once
    is_seen_together = accumulator.parallelism.needs_equal_passes
    found: NonFinite | None = None
    with gradients.undone(), NOTHING if accumulator.norms is None else accumulator.norms.alone():
        for one in plan.passes:
            with tools.sync.around_pass(is_last=is_seen_together):
                loss, *_ = tools.loss_of(plan, one)
                loss.backward()
            if found is None and one.reports:
                found = _look(plan, one, tools, loss.detach().item(), names, is_seen_together=is_seen_together)
            if found is not None and not is_seen_together:
                break
            gradients.zero()
    tools.sync.reset()  # nothing of this is summed over ranks
    every = [one for one in tools.ranks.gather_objects(found) if one is not None]
    return min(every, key=lambda one: (one.micro_batch, one.rank is None)) if every else None


def _look(
    plan: BatchPlan,
    one: Pass,
    tools: Tools,
    loss: float,
    names: Mapping[nn.Parameter, str],
    *,
    is_seen_together: bool,
) -> NonFinite | None:
    bad = next((name for parameter, name in names.items() if not all_finite([parameter.grad])), None)
    if bad is None and math.isfinite(loss):
        return None
    is_known = tools.ranks.size > 1 and not (is_seen_together and math.isfinite(loss))
    return NonFinite(
        micro_batch=one.micro_batch,
        num_micro_batches=plan.num_own,
        loss=loss,
        parameter=bad,
        rank=tools.ranks.rank if is_known else None,
    )
