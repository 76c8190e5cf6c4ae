"""BatchNorm layers whose statistics are not those of the micro-batch that runs."""

from anybatch.norms.layers import Call, Layers, batch_norms, replaced, uses_batch_statistics
from anybatch.norms.lockstep import Lockstep, pooled
from anybatch.norms.policy import NormPolicy
from anybatch.norms.spectral_norms import NO_POWER, PowerSteps
from anybatch.norms.statistics import AS_IS, Statistics

__all__ = [
    "AS_IS",
    "Call",
    "Layers",
    "Lockstep",
    "NO_POWER",
    "NormPolicy",
    "PowerSteps",
    "Statistics",
    "batch_norms",
    "pooled",
    "replaced",
    "uses_batch_statistics",
]
