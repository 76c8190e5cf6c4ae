"""Forwards of all micro-batches that advance together from one BatchNorm to the next."""

from anybatch.norms.lockstep.baton import Lockstep
from anybatch.norms.lockstep.pooled_statistics import pooled

__all__ = [
    "Lockstep",
    "pooled",
]
