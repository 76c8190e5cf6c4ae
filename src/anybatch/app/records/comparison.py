"""The records of `anybatch compare`: arms, their runs over several seeds, what was found, and several seeds as one number."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from anybatch.app.records.schema import Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmEpoch:
    """What one run of an arm had reached after an epoch."""

    epoch: int
    train_loss: float | None
    valid_loss: float | None
    metric: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRun:
    """One seed of an arm."""

    seed: Scalar
    updates: int | None
    samples_seen: int | None
    """Rows that some update learned from, counted once per epoch."""
    seconds: float | None
    peak_bytes: int | None
    epochs: tuple[ArmEpoch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way of training, over several seeds."""

    name: str
    description: str
    batch: int | None
    micro_batch: int | None
    lr: float | None
    runs: tuple[ArmRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The arms, and what was found."""

    file: ClassVar[str] = "compare.json"
    metric: str = "metric"
    arms: tuple[Arm, ...]
    findings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean over seeds, and the sample deviation (n - 1), which one seed does not have."""

    mean: float | None
    deviation: float | None


def spread_of(values: Iterable[float | None]) -> Spread:
    """The mean and deviation of what is known; nan counts as known, because a run that diverged has said something.

    >>> spread_of([1.0, 3.0, None]), spread_of([2.0]), spread_of([])
    (Spread(mean=2.0, deviation=1.4142135623730951), Spread(mean=2.0, deviation=None), Spread(mean=None, deviation=None))
    """
    known = [value for value in values if value is not None]
    if not known:
        return Spread(None, None)
    mean = sum(known) / len(known)
    if len(known) == 1:
        return Spread(mean, None)
    return Spread(mean, math.sqrt(sum((value - mean) ** 2 for value in known) / (len(known) - 1)))


def over_runs(arm: Arm, number: Callable[[ArmRun], float | None]) -> Spread:
    """One number of each run of an arm."""
    return spread_of(number(run) for run in arm.runs)


def at_epoch(arm: Arm, epoch: int, number: Callable[[ArmEpoch], float | None]) -> Spread:
    """One number of an epoch of each run of an arm; 0 stands for the last epoch."""
    points = (point for run in arm.runs for point in (run.epochs if epoch else run.epochs[-1:]))
    return spread_of(number(point) for point in points if epoch in (0, point.epoch))
