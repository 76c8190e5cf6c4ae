"""`Fitted`: what `Fit` chose, and how that is known."""

from dataclasses import dataclass
from typing import Literal

from anybatch.batches import Choice
from anybatch.memory.predicting import Plan, RankedWay
from anybatch.sizes import show_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The micro-batch that fits, and how that is known."""

    kind: Literal["rows", "tokens"]
    """What `size` counts."""
    size: int
    """At most this many rows, or tokens with padding, per micro-batch."""
    plan: Plan | None
    """The prediction; None where there could be none."""
    reason: str
    """Why there could be no prediction."""
    fastest: Choice | None
    """What was found to be the fastest within `size`, where it was asked for."""
    retries: int
    """How often memory ran out all the same, and the micro-batch was halved."""
    measured: int = 0
    """What the last batch took in bytes, where it could not be predicted and was measured instead."""
    way: RankedWay | None = None
    """How batches run, where that is with checkpointing."""

    @property
    def plain_rows(self) -> int | None:
        """How many rows fit without checkpointing, where batches run with it; None where they do not."""
        if self.way is None or self.plan is None:
            return None
        return self.plan.micro_batch // (self.plan.whole_size // self.plan.rows)

    def describe(self) -> str:
        """In words: what was chosen, and why."""
        size = f"{self.size} {self.kind} per micro-batch"
        if self.plan is None:
            how = "found by doubling until memory ran out"
            if self.measured:
                how = f"measured while training ({show_bytes(self.measured)} in the last batch), below the limit"
            text = f"{size}, {how}, because it could not be predicted: {self.reason}"
        else:
            peak = self.plan.peak_bytes if self.size == self.plan.micro_batch else self.plan.peak(self.size)
            size = f"{size} at most"
            if self.way is not None:
                peak, size = self.way.peak, f"{size}, {self.way.way}"
            room = f"{show_bytes(self.plan.memory)} less {self.plan.margin:.0%}"
            text = f"{size}, predicted to need {show_bytes(peak)} of {room} ({self.plan.method})"
        if self.retries:
            text += f"; memory ran out {self.retries} times all the same"
        return f"{text}. " + self.fastest.describe() if self.fastest is not None else f"{text}."
