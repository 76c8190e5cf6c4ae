"""Predicting an update's peak memory, measuring it, choosing what fits."""

from anybatch.memory.fit import Fit, fastest_fit
from anybatch.memory.fitting import Fitted
from anybatch.memory.from_config import parameters_on_meta, plan_config
from anybatch.memory.planning import MARGIN, plan
from anybatch.memory.predicting import Breakdown, Checkpointing, Plan, SizePeak, WayToFit
from anybatch.memory.tracing import bytes_of, drop_gradients, measure_peak, metered, optimizer_tensors, standing_tensors

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
