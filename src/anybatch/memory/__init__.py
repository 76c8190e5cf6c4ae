"""Predict and measure the peak memory of an update, and choose the micro-batch that fits."""

from anybatch.memory.config import parameters_on_meta, plan_config
from anybatch.memory.fit import Fit, Fitted, fastest_fit
from anybatch.memory.meter import bytes_of, drop_gradients, measure_peak, metered, optimizer_tensors, standing_tensors
from anybatch.memory.planning import MARGIN, Breakdown, Checkpointing, Plan, SizePeak, plan
from anybatch.memory.ways_to_fit import WayToFit
