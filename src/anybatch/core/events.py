"""The stages of an update as typed events: load, forward, loss, backward, accumulate, clip, step, zero.

Whoever passes an observer gets each event when its stage has ended. Times are the host's: a device may still be working when
a stage ends. Where memory ran out, `retry` comes between.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One stage that has ended."""

    stage: ClassVar[str]
    started: float
    """`time.perf_counter()` when the stage began."""
    seconds: float
    """How long it took on the host."""
    micro_batch: int | None = None
    """Which micro-batch of the batch, from 0; None for the stages that run once per update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load(Event):
    """A micro-batch was brought to the model's device."""

    stage = "load"
    batch: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward(Event):
    """The model was called. `output` is None when the objective never called the model itself."""

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
    """`.grad` of `parameters` holds the sum of this window so far."""

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
    """Memory ran out: what was told of this batch's micro-batches so far is void, and they start again, smaller."""

    stage = "retry"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize(Event):
    """Batches are cut or run otherwise from now on: larger after memory had run out, or with checkpointing on or off."""

    stage = "resize"
    split: str
    """What batches are cut by, or how they run, in words."""


Observer = Callable[[Event], None]
