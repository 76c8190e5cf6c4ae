"""Optimizers and schedulers that a framework has wrapped: what is inside them, which steps when it is told to."""

from typing import Any

from torch.amp import GradScaler

from anybatch.errors import UpdateError

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
