"""Optimizers, clipping, schedulers and loss scalers."""

import math
import sys
import weakref
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from anybatch.doctor.loops import packed
from anybatch.doctor.recording.tape import Ending, Patches, Tape, around, here, nothing

HORIZONS = ("T_max", "total_steps", "total_iters", "T_0")
"""How torch's schedulers call the number of steps that they are made for."""


def install_step_watch(tape: Tape, patches: Patches) -> None:
    """From now on updates are seen."""
    steps = _Steps(tape)
    safely = tape.safely
    patches.replace(Optimizer, "__init__", around(nothing, safely(lambda _, self, *__, **___: tape.optimizer(self))))
    for owner in (Optimizer, nn.Module):
        patches.replace(owner, "zero_grad", around(safely(steps.before), safely(steps.zeroed)))
    begin, ended = safely(steps.begin), safely(steps.ended)

    def end(optimizer: Optimizer) -> None:
        ended(optimizer)
        steps.end_script()

    patches.handles.append(register_optimizer_step_pre_hook(lambda one, *_: begin(one)))
    patches.handles.append(register_optimizer_step_post_hook(lambda one, *_: end(one)))
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        for module in (nn.utils.clip_grad, nn.utils):
            patches.replace(module, name, _clipping(tape, name))
    _Schedules(tape).install(patches)
    _Scalers(tape).install(patches)


class _Steps:
    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def before(self, *_: Any, **__: Any) -> None:
        self.tape.look()

    def zeroed(self, _: Any, *__: Any, **___: Any) -> None:
        place = here()
        self.tape.look("zero_grad", place)
        self.tape.write("zero", place=place)

    def begin(self, optimizer: Optimizer) -> None:
        tape = self.tape
        number = tape.optimizer(optimizer)
        tape.look()
        tape.write("step-begin", optimizer=number)

    def end_script(self) -> None:
        """Once the updates asked for are seen."""
        tape = self.tape
        if 0 < tape.watch.updates <= tape.num_updates and not tape.is_ended and not tape.is_broken:
            tape.reason = "updates"
            raise Ending(0)

    def ended(self, optimizer: Optimizer) -> None:
        tape = self.tape
        number = tape.optimizer(optimizer)
        own = tape.owned[number]
        holding = [n for n in own if (p := tape.parameters[n]()) is not None and p.grad is not None]
        tape.forget_changes()
        rates = [float(group.get("lr", 0.0)) for group in optimizer.param_groups]
        tape.write(
            "step",
            optimizer=number,
            holding=packed(holding),
            lr=rates,
            scaler=tape.is_inside_scaler,
            probe=tape.probe_values(own),
            place=here(),
        )
        tape.steps[number] = tape.steps.get(number, 0) + 1
        tape.num_updates = max(tape.steps.values())


def _clipping(tape: Tape, name: str) -> Any:
    def make(original: Any) -> Any:
        def clip(*arguments: Any, **named: Any) -> Any:
            given = arguments[0] if arguments else named.pop("parameters")
            parameters = [given] if isinstance(given, Tensor) else list(given)  # a generator is read once
            tape.safely(tape.look)()
            result = original(parameters, *arguments[1:], **named)
            limit = arguments[1] if len(arguments) > 1 else named.get("max_norm", named.get("clip_value", math.inf))
            tape.safely(clipped)(result, parameters, limit)
            return result

        def clipped(result: Any, parameters: list[Tensor], limit: float) -> None:
            tape.forget_changes()
            numbers = [tape.number(p) for p in parameters if isinstance(p, Tensor) and p.requires_grad]
            norm = float(result) if isinstance(result, Tensor) and result.numel() == 1 else None
            limit = float(limit)
            tape.write(
                "clip",
                parameters=packed(numbers),
                limit=limit if math.isfinite(limit) else None,
                norm=norm if norm is not None and math.isfinite(norm) else None,
                kind=name,
                place=here(),
            )

        return clip

    return make


class _Schedules:
    """Steps of schedulers, without the first that each makes of itself and those that one makes of another."""

    def __init__(self, tape: Tape) -> None:
        self.tape, self.depth = tape, 0
        self.numbers: dict[int, tuple[Any, int]] = {}

    def install(self, patches: Patches) -> None:
        kinds = {kind for kind in vars(lr_scheduler).values() if isinstance(kind, type) and "step" in vars(kind)}
        for kind in kinds:
            if kind.__name__ != "object" and issubclass(kind, lr_scheduler.LRScheduler):
                patches.replace(kind, "step", self._make)

        def notice(scheduler: Any, *_: Any, **__: Any) -> None:
            kind = type(scheduler)
            if "step" in vars(kind) and not hasattr(kind.step, "is_doctors"):
                patches.replace(kind, "step", self._make)

        patches.replace(lr_scheduler.LRScheduler, "__init__", around(self.tape.safely(notice), nothing))

    def _make(self, original: Any) -> Any:
        def step(scheduler: Any, *arguments: Any, **named: Any) -> Any:
            self.depth += 1
            try:
                result = original(scheduler, *arguments, **named)
            finally:
                self.depth -= 1
            if not self.depth and not _is_first():
                self.tape.safely(self._stepped)(scheduler)
            return result

        return step

    def _stepped(self, scheduler: Any) -> None:
        known = self.numbers.get(id(scheduler))
        if known is None or known[0]() is not scheduler:
            known = (weakref.ref(scheduler), len(self.numbers))
            self.numbers[id(scheduler)] = known
        optimizer = getattr(scheduler, "optimizer", None)
        number = self.tape.optimizer(optimizer) if isinstance(optimizer, Optimizer) else None
        rates = [float(group["lr"]) for group in optimizer.param_groups] if isinstance(optimizer, Optimizer) else []
        self.tape.write(
            "schedule",
            scheduler=known[1],
            optimizer=number,
            kind=type(scheduler).__name__,
            lr=rates,
            horizon=_horizon(scheduler),
            by=_function(scheduler),
            place=here(),
        )


def _horizon(scheduler: Any) -> int | None:
    """The number of steps that a scheduler was made for, where it says so; transformers' keep theirs in a partial."""
    for name in HORIZONS:
        value = getattr(scheduler, name, None)
        if isinstance(value, int) and value > 1:
            return value
    for function in getattr(scheduler, "lr_lambdas", []):
        named = getattr(function, "keywords", None) or {}
        value = named.get("num_training_steps")
        if isinstance(value, int) and value > 1:
            return value
    inner = getattr(scheduler, "_schedulers", None) or []
    horizons = [_horizon(one) for one in inner]
    if horizons and all(horizons):
        return (
            sum(horizon for horizon in horizons if horizon)
            if hasattr(scheduler, "_milestones")
            else max(filter(None, horizons))
        )
    return None


def _function(scheduler: Any) -> str:
    functions = getattr(scheduler, "lr_lambdas", [])
    return getattr(getattr(functions[0], "func", functions[0]), "__name__", "") if functions else ""


def _is_first() -> bool:
    """True within the constructor of a scheduler of torch."""
    frame = sys._getframe(2)
    for _ in range(8):
        if frame.f_code.co_name == "__init__" and frame.f_code.co_filename == lr_scheduler.__file__:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


class _Scalers:
    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def install(self, patches: Patches) -> None:
        safely = self.tape.safely
        kind: Any = GradScaler
        patches.replace(kind, "scale", around(nothing, safely(self._scaled)))
        patches.replace(kind, "unscale_", around(safely(self._look), safely(self._unscaled)))
        patches.replace(kind, "update", around(nothing, safely(self._updated)))
        patches.replace(kind, "step", self._stepping)

    def _look(self, *_: Any, **__: Any) -> None:
        self.tape.look()

    def _scaled(self, _: Any, scaler: Any, *__: Any, **___: Any) -> None:
        if scaler.is_enabled():
            self.tape.current["scale"] = float(scaler.get_scale())

    def _unscaled(self, _: Any, scaler: Any, optimizer: Optimizer) -> None:
        self.tape.forget_changes()
        if scaler.is_enabled():
            self.tape.write("unscale", optimizer=self.tape.optimizer(optimizer), place=here())

    def _updated(self, _: Any, scaler: Any, *__: Any, **___: Any) -> None:
        if scaler.is_enabled():
            self.tape.write("scaler-update", scale=float(scaler.get_scale()), place=here())

    def _stepping(self, original: Any) -> Any:
        def step(scaler: Any, optimizer: Any, *arguments: Any, **named: Any) -> Any:
            self.tape.safely(self.tape.look)()
            self.tape.is_inside_scaler = scaler.is_enabled()
            before = sum(self.tape.steps.values())
            try:
                result = original(scaler, optimizer, *arguments, **named)
            finally:
                self.tape.is_inside_scaler = False
            if scaler.is_enabled() and sum(self.tape.steps.values()) == before and isinstance(optimizer, Optimizer):
                self.tape.safely(self._skipped)(optimizer)
            return result

        return step

    def _skipped(self, optimizer: Optimizer) -> None:
        self.tape.forget_changes()
        self.tape.write("skipped", optimizer=self.tape.optimizer(optimizer), place=here())
