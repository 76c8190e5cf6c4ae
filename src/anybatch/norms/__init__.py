"""BatchNorm layers whose statistics are not those of the micro-batch that runs."""

from anybatch.norms.layers import Layers, Merging, batch_norms, frozen, merged, uses_batch_statistics
from anybatch.norms.lockstep import Lockstep, pooled

__all__ = [
    "Layers",
    "Lockstep",
    "Merging",
    "batch_norms",
    "frozen",
    "merged",
    "pooled",
    "uses_batch_statistics",
]
