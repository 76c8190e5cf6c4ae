"""BatchNorm layers whose statistics are not those of the micro-batch that runs."""

from anybatch.norms.layers import Call, Layers, batch_norms, replaced, uses_batch_statistics
from anybatch.norms.lockstep import Lockstep, pooled
from anybatch.norms.policy import NormPolicy

__all__ = [
    "Call",
    "Layers",
    "Lockstep",
    "NormPolicy",
    "batch_norms",
    "pooled",
    "replaced",
    "uses_batch_statistics",
]
