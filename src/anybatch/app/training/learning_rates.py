"""Learning rates: scaling for another batch size, warm-up and decay, and schedules of growing batches."""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from torch import optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from anybatch.app.training.settings import Decay, LRRule
from anybatch.display import one_of
from anybatch.errors import SettingsError
from anybatch.noise import NoiseScale

ADAMS = (optim.Adam, optim.NAdam, optim.RAdam, optim.Adamax, optim.SparseAdam)
"""Optimizers with the decay rate of the second moment in `betas[1]`; AdamW is an Adam."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Changes that `scale_lr` made in the first parameter group."""

    factor: float
    """Factor of the learning rate."""
    lr_before: float
    """Learning rate before."""
    lr: float
    """Learning rate now."""
    beta2_before: float | None = None
    """Adam's beta2 before; None for optimizers without one."""
    beta2: float | None = None
    """Adam's beta2 now."""


def scale_lr(
    optimizer: Optimizer, *, batch: int, base_batch: int, rule: LRRule = "linear", keep_half_life: bool = True
) -> Scaling:
    """Scale every group's learning rate for a batch `k = batch / base_batch` times as large.

        linear: lr * k  (Goyal et al. 2017; for SGD)      sqrt: lr * sqrt(k)  (for Adam and its variants)

    Both are rules of thumb: they hold up to a batch size that depends on the task. Call this before a scheduler is made,
    which remembers the learning rate it finds.

    Args:
        optimizer: Optimizer to change in place.
        batch: Rows per update from now on.
        base_batch: Rows per update that the learning rate was chosen for.
        rule: "linear", "sqrt", or "none" to change nothing.
        keep_half_life: Set Adam's beta2 to `beta2 ** k`, so that it forgets after the same number of samples as before.

    Returns:
        The learning rate and beta2 before and after.

    Raises:
        SettingsError: If an argument is not usable, or the optimizer already has a scheduler.

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
    factor = rule_factor(rule, times)
    first = optimizer.param_groups[0]
    lr_before, beta2_before = float(first["lr"]), beta2_of(optimizer)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
        if keep_half_life and rule != "none" and isinstance(optimizer, ADAMS):
            beta1, beta2 = group["betas"]
            group["betas"] = (beta1, beta2**times)
    lr, beta2_after = float(first["lr"]), beta2_of(optimizer)
    return Scaling(factor=factor, lr_before=lr_before, lr=lr, beta2_before=beta2_before, beta2=beta2_after)


def rule_factor(rule: LRRule, times: float) -> float:
    """Return the factor of the learning rate for a batch `times` as large."""
    return {"none": 1.0, "linear": times, "sqrt": math.sqrt(times)}[rule]


def beta2_of(optimizer: Optimizer) -> float | None:
    return float(optimizer.param_groups[0]["betas"][1]) if isinstance(optimizer, ADAMS) else None


def warmup(
    optimizer: Optimizer, num_warmup: int, *, updates: int | None = None, decay: Decay = "none", end: float = 0.0
) -> LambdaLR:
    """Return a scheduler that raises the learning rate over `num_warmup` updates, then lowers it towards `end`.

    Update t, counted from 0, has `(t + 1) / (num_warmup + 1)` of the learning rate during warm-up. Step the scheduler once
    per applied update; `Update(..., scheduler=...)` does.

    Args:
        optimizer: Optimizer to schedule.
        num_warmup: Number of updates with a rising learning rate.
        updates: Number of updates in all; needed for a decay.
        decay: "none", "linear" or "cosine".
        end: Share of the learning rate that the decay ends at, one update after the last.

    Returns:
        A scheduler of torch.

    Raises:
        SettingsError: If `num_warmup` is negative, `decay` is unknown, or `updates` leave no room for the decay.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    >>> warmup(optimizer, 3).get_last_lr()
    [0.25]
    """
    return LambdaLR(optimizer, lr_factor(num_warmup, updates, decay, end))


def lr_factor(num_warmup: int, updates: int | None, decay: Decay, end: float = 0.0) -> Callable[[float], float]:
    """Return the share of the learning rate as a function of the update, counted from 0."""
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


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """Batch size of each epoch.

    `steps` maps epochs, in ascending order, to rows; each holds until the next. With `follows_noise` the batch doubles before
    an epoch if the lower bound of the noise scale is at least that large.
    """

    steps: dict[int, int]
    rows: int  # rows of the training data
    follows_noise: bool = False

    @property
    def is_fixed(self) -> bool:
        return len(self.steps) == 1 and not self.follows_noise

    @property
    def largest(self) -> int:
        return self.rows if self.follows_noise else max(self.steps.values())

    def batch(self, epoch: int) -> int:
        """Return the batch size of an epoch, counted from 1.

        >>> [BatchSchedule({1: 32, 3: 64}, 1000).batch(epoch) for epoch in (1, 2, 3, 9)]
        [32, 32, 64, 64]
        """
        return [rows for first, rows in self.steps.items() if first <= epoch][-1]

    def updates_of(self, epoch: int) -> int:
        return -(-self.rows // self.batch(epoch))

    def updates_before(self, epoch: int) -> int:
        """Return the number of updates in all epochs before this one.

        >>> [BatchSchedule({1: 500, 3: 1000}, 1000).updates_before(epoch) for epoch in (1, 2, 3, 10**9)]
        [0, 2, 4, 1000000001]
        """
        stretches = pairwise([*self.steps, sys.maxsize])  # epochs with equal batches
        return sum(max(min(end, epoch) - first, 0) * self.updates_of(first) for first, end in stretches)

    def epoch_at(self, update: int) -> int:
        """Return the epoch of an update, counted from 0.

        >>> [BatchSchedule({1: 500, 2: 1000}, 1000).epoch_at(update) for update in (0, 1, 2, 3, 10**9)]
        [1, 1, 2, 3, 1000000000]
        """
        first = [first for first in self.steps if self.updates_before(first) <= update][-1]
        return first + (update - self.updates_before(first)) // self.updates_of(first)

    def position(self, update: int) -> float:
        """Return the number of this update if all batches were as large as the first: decay goes by rows, not updates."""
        epoch = self.epoch_at(update)
        share = (update - self.updates_before(epoch)) / self.updates_of(epoch)
        return (epoch - 1 + share) * self.updates_of(1)

    def follow(self, epoch: int, scale: NoiseScale | None) -> None:
        """Set the batch size of an epoch that begins."""
        before = self.batch(epoch)
        if self.follows_noise and scale is not None and scale.low >= 2 * before <= self.rows:
            self.steps[epoch] = 2 * before

    def lr_factor(self, num_warmup: int, updates: int, decay: Decay, rule: LRRule) -> Callable[[int], float]:
        """Return the share of the first batch's learning rate as a function of the update."""
        if self.is_fixed:
            return lr_factor(num_warmup, updates, decay)
        shape = lr_factor(num_warmup, math.ceil(self.position(updates)), decay)

        def factor(update: int) -> float:
            return shape(self.position(update)) * rule_factor(rule, self.batch(self.epoch_at(update)) / self.batch(1))

        return factor

    def set_beta2(self, optimizer: Optimizer, epoch: int, first: float | None) -> None:
        """Set Adam's beta2 so that it forgets after as many samples as with the first batch, where it was `first`."""
        if first is None or self.is_fixed or beta2_of(optimizer) is None:
            return
        for group in optimizer.param_groups:
            group["betas"] = (group["betas"][0], first ** (self.batch(epoch) / self.batch(1)))

    def describe(self) -> str | None:
        """Describe growing batches in words; None if all have one size."""
        if self.is_fixed:
            return None
        steps = ", ".join(f"{rows} rows from epoch {epoch}" for epoch, rows in self.steps.items())
        return f"{steps}; doubled as the noise grows" if self.follows_noise else steps


def schedule_of(given: Mapping[int, int] | Literal["noise"] | None, *, batch: int, rows: int) -> BatchSchedule:
    """Return the schedule of `Task.batch_schedule`; `batch` is the first batch size, `rows` the training data."""
    if given is None or given == "noise":
        return BatchSchedule({1: batch}, rows, follows_noise=given == "noise")
    is_whole = isinstance(given, Mapping) and all(
        type(one) is int and one > 0 for pair in given.items() for one in pair
    )
    if not is_whole or 1 not in given:
        raise SettingsError(
            f"batch_schedule={given!r}: expected rows by the first epoch that has them, epoch 1 among them, such as "
            '{1: 32, 4: 64}, or "noise".'
        )
    return BatchSchedule(dict(sorted(given.items())), rows)
