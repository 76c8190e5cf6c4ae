"""Predicting an update's peak memory, measuring it, choosing what fits."""

from anybatch.memory.config import parameters_on_meta, plan_config
from anybatch.memory.fit import Fit, fastest_fit
from anybatch.memory.fitting import Fitted
from anybatch.memory.memory_plan import Breakdown, Checkpointing, Plan, SizePeak
from anybatch.memory.meter import bytes_of, drop_gradients, measure_peak, metered, optimizer_tensors, standing_tensors
from anybatch.memory.planning import MARGIN, plan
from anybatch.memory.ways_to_fit import WayToFit

__all__ = [
    "Breakdown",
    "Checkpointing",
    "Fit",
    "Fitted",
    "MARGIN",
    "Plan",
    "SizePeak",
    "WayToFit",
    "bytes_of",
    "drop_gradients",
    "fastest_fit",
    "measure_peak",
    "metered",
    "optimizer_tensors",
    "parameters_on_meta",
    "plan",
    "plan_config",
    "standing_tensors",
]
