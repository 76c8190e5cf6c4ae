"""How far a run is, in values that a checkpoint holds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anybatch.update import UpdateResult


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSums:
    """What an epoch has seen so far."""

    units: float = 0.0
    loss: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def plus(self, result: UpdateResult, seconds: float, *, is_sum: bool) -> "EpochSums":
        """With one more update, whose loss is a mean over its units, or a sum; one that was skipped counts its time only."""
        if not result.applied:
            return EpochSums(units=self.units, loss=self.loss, metrics=self.metrics, seconds=self.seconds + seconds)
        units = float(result.units)
        metrics = {name: self.metrics.get(name, 0.0) + units * float(value) for name, value in result.metrics.items()}
        return EpochSums(
            units=self.units + units,
            loss=self.loss + float(result.loss) * (1.0 if is_sum else units),
            metrics=metrics,
            seconds=self.seconds + seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is: what a checkpoint holds besides the states of the update."""

    update: int = 0
    """Updates done."""
    epoch: int = 1
    """The epoch that the next update belongs to."""
    sums: EpochSums = field(default_factory=EpochSums)
    best: float | None = None
    """The best of the metric so far, on the validation data; the lowest loss where there is no metric."""
    last: Mapping[str, Any] = field(default_factory=dict)
    """The latest epoch's record."""
    loader_state: dict[str, Any] | None = None
    batches: Mapping[int, int] = field(default_factory=dict)
    """Rows of a batch by the first epoch that has them, as far as that is decided."""

    def to_plain(self) -> dict[str, Any]:
        """As plain values, for a checkpoint, which keeps the loader's state in a place of its own."""
        sums = {name: getattr(self.sums, name) for name in ("units", "loss", "metrics", "seconds")}
        return {
            "update": self.update,
            "epoch": self.epoch,
            "sums": sums | {"metrics": dict(self.sums.metrics)},
            "best": self.best,
            "last": dict(self.last),
            "batches": dict(self.batches),
        }

    @staticmethod
    def from_plain(values: Mapping[str, Any], loader_state: dict[str, Any] | None) -> "Progress":
        """From a checkpoint."""
        return Progress(
            update=values["update"],
            epoch=values["epoch"],
            sums=EpochSums(**values["sums"]),
            best=values["best"],
            last=values["last"],
            loader_state=loader_state,
            batches=values.get("batches", {}),
        )
