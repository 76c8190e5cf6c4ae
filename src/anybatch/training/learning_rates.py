"""The learning rate: what another batch size asks of it, and how it rises and falls over the updates."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from torch import optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from anybatch.errors import SettingsError
from anybatch.faces import one_of
from anybatch.training.settings import Decay, LRRule

ADAMS = (optim.Adam, optim.NAdam, optim.RAdam, optim.Adamax, optim.SparseAdam)
"""Optimizers whose `betas[1]` is how slowly the second moment forgets; AdamW is an Adam."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """What `scale_lr` changed in the first parameter group."""

    factor: float
    lr_before: float
    lr: float
    beta2_before: float | None = None
    """None where the optimizer has none."""
    beta2: float | None = None


def scale_lr(
    optimizer: Optimizer, *, batch: int, base_batch: int, rule: LRRule = "linear", keep_half_life: bool = True
) -> Scaling:
    """Multiply every group's learning rate for a batch that is `k = batch / base_batch` times the one it was chosen for.

        linear: lr * k  (Goyal et al. 2017; for SGD)      sqrt: lr * sqrt(k)  (for Adam and its kin)

    With `keep_half_life`, Adam's second moment goes on forgetting after the same number of samples: beta2 becomes
    `beta2 ** k`. Rules of thumb both: they hold up to some batch size that the task decides, not for ever. `"none"` changes
    nothing. Call it before a scheduler is made, which takes note of the learning rate it finds.

    >>> import torch
    >>> scale_lr(torch.optim.SGD([torch.zeros(1)], lr=0.1), batch=64, base_batch=16).lr
    0.4
    """
    if rule not in get_args(LRRule):
        raise SettingsError(f"scale_lr(rule={rule!r}): {one_of(rule, get_args(LRRule))}")
    for name, value in (("batch", batch), ("base_batch", base_batch)):
        if not value > 0:
            raise SettingsError(f"scale_lr({name}={value!r}): expected a number of rows above 0.")
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise SettingsError(
            "scale_lr was called on an optimizer that already has a scheduler, which would set the learning rate back. Call "
            "scale_lr first, then make the scheduler."
        )
    times = batch / base_batch
    factor = {"none": 1.0, "linear": times, "sqrt": math.sqrt(times)}[rule]
    first = optimizer.param_groups[0]
    lr_before, beta2_before = float(first["lr"]), beta2_of(optimizer)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
        if keep_half_life and rule != "none" and isinstance(optimizer, ADAMS):
            beta1, beta2 = group["betas"]
            group["betas"] = (beta1, beta2**times)
    return Scaling(
        factor=factor,
        lr_before=lr_before,
        lr=float(first["lr"]),
        beta2_before=beta2_before,
        beta2=beta2_of(optimizer),
    )


def beta2_of(optimizer: Optimizer) -> float | None:
    """How slowly the second moment of the first group forgets; None of optimizers that have none."""
    return float(optimizer.param_groups[0]["betas"][1]) if isinstance(optimizer, ADAMS) else None


def warmup(
    optimizer: Optimizer, num_warmup: int, *, updates: int | None = None, decay: Decay = "none", end: float = 0.0
) -> LambdaLR:
    """A scheduler, to be stepped once per applied update: up over `num_warmup` updates, then down towards `end`.

    Update t, counted from 0, has `(t + 1) / (num_warmup + 1)` of the learning rate while it rises. Then `decay` falls to the
    part `end` of it, which the update after the last of `updates` would have.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    >>> warmup(optimizer, 3).get_last_lr()
    [0.25]
    """
    return LambdaLR(optimizer, lr_factor(num_warmup, updates, decay, end))


def lr_factor(num_warmup: int, updates: int | None, decay: Decay, end: float = 0.0) -> Callable[[float], float]:
    """The part of the learning rate that update t has: a pure function of t, so that the last is known at the start."""
    if num_warmup < 0:
        raise SettingsError(f"warmup of {num_warmup!r} updates: expected 0 or more.")
    if decay not in get_args(Decay):
        raise SettingsError(f"decay={decay!r}: {one_of(decay, get_args(Decay))}")
    if decay != "none" and (updates is None or updates <= num_warmup):
        raise SettingsError(
            f"decay={decay!r} over updates={updates!r} after a warm-up of {num_warmup}: give more updates than the warm-up "
            "has, or decay='none'."
        )

    def factor(update: float) -> float:
        if update < num_warmup:
            return (update + 1) / (num_warmup + 1)
        if decay == "none" or updates is None:
            return 1.0
        gone = min(1.0, (update - num_warmup) / (updates - num_warmup))
        left = 1.0 - gone if decay == "linear" else (1.0 + math.cos(math.pi * gone)) / 2.0
        return end + (1.0 - end) * left

    return factor
