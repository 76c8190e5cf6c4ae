"""What a plan is made of: memory at the peak by kind, the peak of one size, what checkpointing saves, ways by time."""

from dataclasses import dataclass, fields
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """What the memory at the peak is made of, in bytes."""

    parameters: int
    """Parameters and buffers."""
    gradients: int
    optimizer: int
    activations: int
    """What forward left for backward."""
    inputs: int
    temporaries: int
    """All else that lives at that moment: what one op hands to the next."""

    @property
    def total(self) -> int:
        """The peak."""
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class SizePeak:
    """The predicted peak of one micro-batch size."""

    size: int
    """Rows, or tokens."""
    peak: int
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """What recomputing each block of the model in backward, instead of keeping what it saved, would change."""

    blocks: str
    """Which modules: their path, how many, of what kind."""
    size: int
    """The micro-batch that is compared."""
    peak: int
    """With checkpointing."""
    saved: int
    """Bytes less than without it; 0 where it does not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedWay:
    """One way to run the batch inside the memory, and how long its passes take."""

    kind: Literal["smaller", "checkpointing", "offload"]
    way: str
    """In words: "smaller micro-batches", "checkpointing the 8 Block of blocks", "saved tensors on the host"."""
    micro_batch: int
    """Rows, or tokens, of a micro-batch."""
    passes: int
    """Micro-batches of the batch."""
    peak: int
    """Of the update, in bytes."""
    seconds: float | None
    """Of all passes of an update, from passes that were measured; None where none could be."""
    work: float
    """Of what is computed, in passes without recomputation; counted, not measured."""
