"""The records of `anybatch compare`: arms, their runs over several seeds, and what was found."""

from dataclasses import dataclass
from typing import ClassVar

from anybatch.records.schema import Scalar


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
