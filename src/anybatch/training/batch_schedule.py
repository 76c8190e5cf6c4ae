"""Batches that grow from epoch to epoch, and the learning rate and beta2 that follow them."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Literal

from torch.optim import Optimizer

from anybatch.errors import SettingsError
from anybatch.noise import NoiseScale
from anybatch.training.learning_rates import ADAMS, beta2_of
from anybatch.training.settings import LRRule

GivenSchedule = Mapping[int, int] | Literal["noise"] | None
"""Rows by the first epoch that has them; or "noise", which decides as the run goes on."""


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
        """True where all batches have one size, and nothing has to follow."""
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
        """The updates of one epoch."""
        return -(-self._rows // self.batch(epoch))

    def updates_before(self, epoch: int) -> int:
        """The updates of all epochs before this one.

        >>> [BatchSchedule({1: 500, 3: 1000}, 1000).updates_before(epoch) for epoch in (1, 2, 3, 10**9)]
        [0, 2, 4, 1000000001]
        """
        return sum(max(min(end, epoch) - first, 0) * self.updates_of(first) for first, end in self._stretches())

    def epoch_at(self, update: int) -> int:
        """The epoch of this update, counted from 0.

        >>> [BatchSchedule({1: 500, 2: 1000}, 1000).epoch_at(update) for update in (0, 1, 2, 3, 10**9)]
        [1, 1, 2, 3, 1000000000]
        """
        begins = [first for first, _ in self._stretches() if self.updates_before(first) <= update]
        first = begins[-1]
        return first + (update - self.updates_before(first)) // self.updates_of(first)

    def _stretches(self) -> Iterable[tuple[int, int]]:
        """Epochs of equal batches, each stretch by its first epoch and the first of the next."""
        return pairwise([*self.steps, sys.maxsize])

    def position(self, update: int) -> float:
        """Where this update would be if all batches had the size of the first: so decay goes by rows, not by updates."""
        epoch = self.epoch_at(update)
        share = (update - self.updates_before(epoch)) / self.updates_of(epoch)
        return (epoch - 1 + share) * self.updates_of(1)

    def follow(self, epoch: int, scale: NoiseScale | None) -> None:
        """Decide what the batches of this epoch have, at its begin."""
        before = self.batch(epoch)
        if self.follows_noise and scale is not None and scale.low >= 2 * before <= self._rows:
            self.steps[epoch] = 2 * before

    def factor(self, shape: Callable[[float], float], rule: LRRule) -> Callable[[int], float]:
        """The part of the first batch's learning rate that update t has: its rise and fall, `shape`, and the rule."""

        def of_update(update: int) -> float:
            times = self.batch(self.epoch_at(update)) / self.batch(1)
            part = {"none": 1.0, "linear": times, "sqrt": math.sqrt(times)}[rule]
            return shape(self.position(update)) * part

        return of_update

    def set_beta2(self, optimizer: Optimizer, epoch: int, first: float | None) -> None:
        """Let Adam's second moment forget after as many samples as it did at the first batch, where beta2 was `first`."""
        if first is None or self.is_fixed or beta2_of(optimizer) is None:
            return
        for group in optimizer.param_groups:
            assert isinstance(optimizer, ADAMS)
            group["betas"] = (group["betas"][0], first ** (self.batch(epoch) / self.batch(1)))

    def describe(self) -> str | None:
        """In words; None where all batches have one size."""
        if self.is_fixed:
            return None
        steps = ", ".join(f"{rows} rows from epoch {epoch}" for epoch, rows in self.steps.items())
        return f"{steps}; doubled as the noise grows" if self.follows_noise else steps


def schedule_of(given: GivenSchedule, *, batch: int, rows: int) -> BatchSchedule:
    """The schedule of a task whose batches begin with `batch` rows, of `rows` that there are."""
    if given is None:
        return BatchSchedule({1: batch}, rows)
    if given == "noise":
        return BatchSchedule({1: batch}, rows, follows_noise=True)
    is_map = isinstance(given, Mapping) and bool(given)
    is_whole = is_map and all(type(one) is int and one > 0 for pair in given.items() for one in pair)
    if not is_whole or 1 not in given:
        raise SettingsError(
            f"batch_schedule={given!r}: expected rows by the first epoch that has them, epoch 1 among them, such as "
            '{1: 32, 4: 64}, or "noise".'
        )
    return BatchSchedule(given, rows)
