"""How the passes of a batch become its gradient."""

from anybatch.passes.schedules.in_lockstep import ExactNorm
from anybatch.passes.schedules.two_passes import Together, run_coupled

__all__ = [
    "ExactNorm",
    "Together",
    "run_coupled",
]
