"""The learning rate: what another batch size asks of it, how it rises and falls, and how it follows batches that grow."""

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
"""Optimizers whose `betas[1]` is how slowly the second moment forgets; AdamW is an Adam."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Changes that `scale_lr` made in the first parameter group."""

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
    lr, beta2_after = float(first["lr"]), beta2_of(optimizer)
    return Scaling(factor=factor, lr_before=lr_before, lr=lr, beta2_before=beta2_before, beta2=beta2_after)


def beta2_of(optimizer: Optimizer) -> float | None:
    """The beta2 of the first group; None of optimizers that have none."""
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


class BatchSchedule:
    """How many rows the batches of each epoch have.

    `steps` maps epochs to rows: each holds until the next. With `follows_noise` an epoch has twice the rows of the one before
    if the noise scale is surely that large: if the low end of its interval is.
    """

    def __init__(self, steps: Mapping[int, int], rows: int, *, follows_noise: bool = False) -> None:
        self.steps = dict(sorted(steps.items()))
        self._rows = rows
        self.follows_noise = follows_noise

    @property
    def is_fixed(self) -> bool:
        """True if all batches have one size."""
        return len(self.steps) == 1 and not self.follows_noise

    @property
    def largest(self) -> int:
        """The most rows that a batch may have."""
        return self._rows if self.follows_noise else max(self.steps.values())

    def batch(self, epoch: int) -> int:
        """The rows of a batch of this epoch, counted from 1.

        >>> [BatchSchedule({1: 32, 3: 64}, 1000).batch(epoch) for epoch in (1, 2, 3, 9)]
        [32, 32, 64, 64]
        """
        return [rows for first, rows in self.steps.items() if first <= epoch][-1]

    def updates_of(self, epoch: int) -> int:
        return -(-self._rows // self.batch(epoch))

    def updates_before(self, epoch: int) -> int:
        """The updates of all epochs before this one.

        >>> [BatchSchedule({1: 500, 3: 1000}, 1000).updates_before(epoch) for epoch in (1, 2, 3, 10**9)]
        [0, 2, 4, 1000000001]
        """
        stretches = pairwise([*self.steps, sys.maxsize])  # epochs with equal batches
        return sum(max(min(end, epoch) - first, 0) * self.updates_of(first) for first, end in stretches)

    def epoch_at(self, update: int) -> int:
        """The epoch of this update, counted from 0.

        >>> [BatchSchedule({1: 500, 2: 1000}, 1000).epoch_at(update) for update in (0, 1, 2, 3, 10**9)]
        [1, 1, 2, 3, 1000000000]
        """
        first = [first for first in self.steps if self.updates_before(first) <= update][-1]
        return first + (update - self.updates_before(first)) // self.updates_of(first)

    def position(self, update: int) -> float:
        """Number that this update would have if all batches were as large as the first: decay goes by rows, not by updates."""
        epoch = self.epoch_at(update)
        share = (update - self.updates_before(epoch)) / self.updates_of(epoch)
        return (epoch - 1 + share) * self.updates_of(1)

    def follow(self, epoch: int, scale: NoiseScale | None) -> None:
        """Decide on the batches of an epoch that begins."""
        before = self.batch(epoch)
        if self.follows_noise and scale is not None and scale.low >= 2 * before <= self._rows:
            self.steps[epoch] = 2 * before

    def factor(self, shape: Callable[[float], float], rule: LRRule) -> Callable[[int], float]:
        """The part of the first batch's learning rate that update t has: its rise and fall, `shape`, and the rule."""

        def of_update(update: int) -> float:
            times = self.batch(self.epoch_at(update)) / self.batch(1)
            return shape(self.position(update)) * {"none": 1.0, "linear": times, "sqrt": math.sqrt(times)}[rule]

        return of_update

    def set_beta2(self, optimizer: Optimizer, epoch: int, first: float | None) -> None:
        """Let Adam's second moment forget after as many samples as it did at the first batch, where beta2 was `first`."""
        if first is None or self.is_fixed or beta2_of(optimizer) is None:
            return
        for group in optimizer.param_groups:
            group["betas"] = (group["betas"][0], first ** (self.batch(epoch) / self.batch(1)))

    def describe(self) -> str | None:
        """In words; None where all batches have one size."""
        if self.is_fixed:
            return None
        steps = ", ".join(f"{rows} rows from epoch {epoch}" for epoch, rows in self.steps.items())
        return f"{steps}; doubled as the noise grows" if self.follows_noise else steps


def schedule_of(given: Mapping[int, int] | Literal["noise"] | None, *, batch: int, rows: int) -> BatchSchedule:
    """The schedule of a task whose batches begin with `batch` rows, of `rows` that there are."""
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
    return BatchSchedule(given, rows)
