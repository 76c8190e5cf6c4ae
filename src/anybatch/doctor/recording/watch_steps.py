"""Record optimizer steps, clipping, schedulers and loss scalers."""

import math
import weakref
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from anybatch.doctor.log import packed
from anybatch.doctor.recording.event_log import EventLog, here, is_called_by
from anybatch.doctor.recording.installing import Ending

HORIZONS = ("T_max", "total_steps", "total_iters", "T_0")
"""Attributes of torch's schedulers with the number of steps that they are made for."""


def install_step_watch(log: EventLog) -> None:
    """Patch optimizers, clipping, schedulers and scalers."""
    _watch_optimizers(log)
    _watch_clipping(log)
    _ScheduleWatch(log)
    _watch_scalers(log)
    _watch_scaled_steps(log)


def _watch_optimizers(log: EventLog) -> None:
    def zeroed(*_: Any, **__: Any) -> None:
        place = here()
        log.log_changes(is_zeroed=True, place=place)
        log.write("zero", place=place)

    def begin(optimizer: Optimizer) -> None:
        number = log.optimizer(optimizer)
        log.log_changes()
        log.write("step-begin", optimizer=number)

    def end(optimizer: Optimizer) -> None:
        number = log.optimizer(optimizer)
        own = log.owned[number]
        holding = [n for n in own if (p := log.parameters[n]()) is not None and p.grad is not None]
        log.accept_changes()
        log.write(
            "step",
            optimizer=number,
            holding=packed(holding),
            lr=[float(group.get("lr", 0.0)) for group in optimizer.param_groups],
            scaler=log.is_inside_scaler,
            probe=log.probe_values(own),
            place=here(),
        )
        log.steps[number] = log.steps.get(number, 0) + 1
        log.num_updates = max(log.steps.values())

    safe_begin, safe_end = log.safely(begin), log.safely(end)

    def end_script_too(optimizer: Optimizer, *_: Any) -> None:
        safe_end(optimizer)
        if 0 < log.watch.updates <= log.num_updates and not log.is_ended and not log.is_broken:
            log.reason = "updates"
            raise Ending(0)

    log.around(Optimizer, "__init__", after=lambda _, optimizer, *__, **___: log.optimizer(optimizer))
    for owner in (Optimizer, nn.Module):
        log.around(owner, "zero_grad", lambda *_, **__: log.log_changes(), zeroed)
    log.patches.callback(register_optimizer_step_pre_hook(lambda one, *_: safe_begin(one)).remove)
    log.patches.callback(register_optimizer_step_post_hook(end_script_too).remove)


def _watch_clipping(log: EventLog) -> None:
    def clipped(result: Any, parameters: list[Tensor], limit: float) -> None:
        log.accept_changes()
        numbers = [log.number(p) for p in parameters if isinstance(p, Tensor) and p.requires_grad]
        norm = float(result) if isinstance(result, Tensor) and result.numel() == 1 else None
        log.write(
            "clip",
            parameters=packed(numbers),
            limit=float(limit) if math.isfinite(limit) else None,
            norm=norm if norm is not None and math.isfinite(norm) else None,
            place=here(),
        )

    def make(original: Any) -> Any:
        def clip(*arguments: Any, **named: Any) -> Any:
            given = arguments[0] if arguments else named.pop("parameters")
            parameters = [given] if isinstance(given, Tensor) else list(given)  # a generator can be read once
            log.safely(log.log_changes)()
            result = original(parameters, *arguments[1:], **named)
            limit = arguments[1] if len(arguments) > 1 else named.get("max_norm", named.get("clip_value", math.inf))
            log.safely(clipped)(result, parameters, limit)
            return result

        return clip

    for name in ("clip_grad_norm_", "clip_grad_value_"):
        for module in (nn.utils.clip_grad, nn.utils):
            log.patch(module, name, make)


class _ScheduleWatch:
    """Records steps of schedulers, except the one in a constructor and those that one scheduler makes of another."""

    def __init__(self, log: EventLog) -> None:
        self.log, self.depth = log, 0
        self.numbers: dict[int, tuple[Any, int]] = {}
        kinds = {kind for kind in vars(lr_scheduler).values() if isinstance(kind, type) and "step" in vars(kind)}
        for kind in kinds:
            if issubclass(kind, lr_scheduler.LRScheduler):
                log.patch(kind, "step", self._make)
        log.around(lr_scheduler.LRScheduler, "__init__", self._patch_subclass)

    def _patch_subclass(self, scheduler: Any, *_: Any, **__: Any) -> None:
        kind = type(scheduler)
        if "step" in vars(kind) and not hasattr(kind.step, "is_doctors"):
            self.log.patch(kind, "step", self._make)

    def _make(self, original: Any) -> Any:
        def step(scheduler: Any, *arguments: Any, **named: Any) -> Any:
            self.depth += 1
            try:
                result = original(scheduler, *arguments, **named)
            finally:
                self.depth -= 1
            if not self.depth and not is_called_by("__init__", "lr_scheduler.py"):
                self.log.safely(self._stepped)(scheduler)
            return result

        return step

    def _stepped(self, scheduler: Any) -> None:
        known = self.numbers.get(id(scheduler))
        if known is None or known[0]() is not scheduler:
            known = self.numbers[id(scheduler)] = (weakref.ref(scheduler), len(self.numbers))
        optimizer, functions = getattr(scheduler, "optimizer", None), getattr(scheduler, "lr_lambdas", [])
        self.log.write(
            "schedule",
            scheduler=known[1],
            optimizer=self.log.optimizer(optimizer) if isinstance(optimizer, Optimizer) else None,
            kind=type(scheduler).__name__,
            horizon=_horizon(scheduler),
            by=getattr(getattr(functions[0], "func", functions[0]), "__name__", "") if functions else "",
            place=here(),
        )


def _horizon(scheduler: Any) -> int | None:
    """Return the number of steps that a scheduler was made for, if it has that; transformers' keep it in a partial."""
    said = [getattr(scheduler, name, None) for name in HORIZONS]
    for function in getattr(scheduler, "lr_lambdas", []):
        said.append((getattr(function, "keywords", None) or {}).get("num_training_steps"))
    for value in said:
        if isinstance(value, int) and value > 1:
            return value
    inner = [_horizon(one) for one in getattr(scheduler, "_schedulers", None) or []]
    known = [horizon for horizon in inner if horizon]
    if not known or len(known) < len(inner):
        return None
    return sum(known) if hasattr(scheduler, "_milestones") else max(known)


def _watch_scalers(log: EventLog) -> None:
    def scaled(_: Any, scaler: Any, *__: Any, **___: Any) -> None:
        if scaler.is_enabled():
            log.current["scale"] = float(scaler.get_scale())

    def unscaled(_: Any, scaler: Any, optimizer: Optimizer) -> None:
        log.accept_changes()
        if scaler.is_enabled():
            log.write("unscale", optimizer=log.optimizer(optimizer), place=here())

    def updated(_: Any, scaler: Any, *__: Any, **___: Any) -> None:
        if scaler.is_enabled():
            log.write("scaler-update", scale=float(scaler.get_scale()), place=here())

    log.around(GradScaler, "scale", after=scaled)
    log.around(GradScaler, "unscale_", lambda *_, **__: log.log_changes(), unscaled)
    log.around(GradScaler, "update", after=updated)


def _watch_scaled_steps(log: EventLog) -> None:
    def skipped(optimizer: Optimizer) -> None:
        log.accept_changes()
        log.write("skipped", optimizer=log.optimizer(optimizer), place=here())

    def make(original: Any) -> Any:
        def step(scaler: Any, optimizer: Any, *arguments: Any, **named: Any) -> Any:
            log.safely(log.log_changes)()
            log.is_inside_scaler = scaler.is_enabled()
            before = sum(log.steps.values())
            try:
                result = original(scaler, optimizer, *arguments, **named)
            finally:
                log.is_inside_scaler = False
            if scaler.is_enabled() and sum(log.steps.values()) == before and isinstance(optimizer, Optimizer):
                log.safely(skipped)(optimizer)
            return result

        return step

    log.patch(GradScaler, "step", make)
