"""The exact gradient: objectives, the window, the accumulator, precision."""

from anybatch.gradients.accumulator import Accumulated, Accumulator, Autocast
from anybatch.gradients.criteria import supervised
from anybatch.gradients.huggingface import huggingface
from anybatch.gradients.metrics import Mean, Metric, Metrics, PerRow, Sum
from anybatch.gradients.objective import Objective
from anybatch.gradients.window import Window

__all__ = [
    "Accumulated",
    "Accumulator",
    "Autocast",
    "Mean",
    "Metric",
    "Metrics",
    "Objective",
    "PerRow",
    "Sum",
    "Window",
    "huggingface",
    "supervised",
]
