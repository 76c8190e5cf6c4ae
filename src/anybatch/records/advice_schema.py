"""The record of what another batch would bring."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOutlook:
    """What a batch of this size would take to the same loss, as multiples of the batch that was asked for."""

    batch: int
    updates: float
    samples: float
    seconds: float | None
    """None where times were not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceRecord:
    """What the noise of the gradient says of the batch."""

    file: ClassVar[str] = "advice.json"
    batch: int
    micro_batch: int | None
    ranks: int
    noise_scale: float | None
    """In rows; None where there is a `reason`."""
    factor: float
    """By how much predictions from noise scales were off in runs, either way."""
    fixed_seconds: float | None
    """What an update takes beside its rows, the sum over ranks included."""
    row_seconds: float | None
    """What a row takes on all ranks together."""
    soonest: float | None
    """The batch that reaches a loss soonest."""
    sentences: tuple[str, ...]
    outlook: tuple[BatchOutlook, ...]
    reason: str = ""
