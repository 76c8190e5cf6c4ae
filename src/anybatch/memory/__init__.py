"""Predicting the memory of an update before it runs, and measuring it when it does."""

from anybatch.memory.fit import Fit, Fitted
from anybatch.memory.meter import measure_peak
from anybatch.memory.plan import Breakdown, Checkpointing, Plan, SizePeak
from anybatch.memory.planning import plan

__all__ = ["Breakdown", "Checkpointing", "Fit", "Fitted", "Plan", "SizePeak", "measure_peak", "plan"]
