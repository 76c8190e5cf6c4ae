"""Typed events of the stages of an update: load, forward, loss, backward, accumulate, clip, step, zero.

An observer gets each event when its stage has ended; a running profiler sees the stages as ranges. Times are the host's: a
device may still be working when a stage ends. `retry` follows an out-of-memory error.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.jit import ScriptModule

from anybatch.core.torch_private import is_compiled_in_place, profiler_enabled


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One stage that has ended."""

    stage: ClassVar[str]
    started: float
    """`time.perf_counter()` when the stage began."""
    seconds: float
    """Duration on the host."""
    micro_batch: int | None = None
    """Number of the micro-batch, from 0; None for the stages that run once per update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load(Event):
    """A micro-batch was moved to the model's device."""

    stage = "load"
    batch: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward(Event):
    """The model was called. `output` is None if the objective called only parts of the model."""

    stage = "forward"
    output: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss(Event):
    """The micro-batch has a loss; `share` is its weight in the batch's loss."""

    stage = "loss"
    loss: Tensor
    units: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward(Event):
    """The backward pass of one micro-batch is done."""

    stage = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulate(Event):
    """`.grad` of `parameters` holds the sum of the batch so far."""

    stage = "accumulate"
    parameters: tuple[nn.Parameter, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip(Event):
    """The gradients were clipped; `grad_norm` is their norm before."""

    stage = "clip"
    grad_norm: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Event):
    """The optimizer stepped, or the step was skipped."""

    stage = "step"
    applied: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero(Event):
    """The gradients of `parameters` were cleared."""

    stage = "zero"
    parameters: tuple[nn.Parameter, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry(Event):
    """Memory ran out: earlier events of this batch are void, and it starts again in smaller micro-batches."""

    stage = "retry"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize(Event):
    """From now on, micro-batches are larger than since memory ran out, or checkpointing is on or off."""

    stage = "resize"
    split: str
    """New split, or the change of checkpointing, in words."""


Observer = Callable[[Event], None]


class Events:
    """Timer of stages: calls the observer, and opens profiler ranges `anybatch.load`, `anybatch.forward` and so on."""

    def __init__(self, observer: Observer | None = None, *, is_heard: bool) -> None:
        self._observer = observer
        self._is_heard = is_heard
        self._range: record_function | None = None
        self._started = 0.0
        self._stage = ""

    def begin(self, kind: type[Event]) -> None:
        """Open a stage; an open stage is closed without an event."""
        if not self._is_heard:
            return
        self.close()
        self._stage = kind.stage
        self._range = record_function(f"anybatch.{kind.stage}")
        self._range.__enter__()
        self._started = perf_counter()

    def end(self, kind: type[Event], **facts: Any) -> None:
        """Close the open stage and call the observer with its event."""
        if not self._is_heard:
            return
        seconds = perf_counter() - self._started
        self.close()
        if self._observer is not None:
            self._observer(kind(started=self._started, seconds=seconds, **facts))

    def end_loss(self, loss: Tensor, *, micro_batch: int | None, units: float, share: float) -> None:
        """Close the stage of a loss; the event has the loss without its graph."""
        if self._is_heard:
            self.end(Loss, micro_batch=micro_batch, loss=loss.detach(), units=units, share=share)

    def close(self) -> None:
        """Close the open stage, if any, without an event."""
        self._stage = ""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    @contextmanager
    def forward(self, model: nn.Module, micro_batch: int) -> Iterator[None]:
        """Separate forward from loss while an objective runs, by hooks on the model.

        Each call of the model is one `Forward`; the time after the last call is the loss.
        """
        if not self._is_heard:
            yield
            return

        def before(module: nn.Module, inputs: Any) -> None:
            if self._stage != Forward.stage:
                self.begin(Forward)

        def after(module: nn.Module | None, inputs: Any, output: Any) -> None:
            self.end(Forward, micro_batch=micro_batch, output=output)
            self.begin(Loss)

        hooks = []
        # hooks on a module compiled in place, by model.compile(), would be traced, and recompiled for every micro-batch
        if not is_compiled_in_place(model) and not isinstance(model, ScriptModule):
            hooks = [model.register_forward_pre_hook(before, prepend=True), model.register_forward_hook(after)]
        try:
            self.begin(Forward)
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if self._stage == Forward.stage:
            after(None, (), None)


SILENT = Events(is_heard=False)
"""Events without observer and profiler: every method returns at once."""


def events_for(observer: Observer | None) -> Events:
    """Return `SILENT` unless there is an observer or a running profiler."""
    return SILENT if observer is None and not profiler_enabled() else Events(observer, is_heard=True)
