"""The exact gradient: objectives, the window, the accumulator, precision."""

from anybatch.gradients.accumulated import Accumulated
from anybatch.gradients.accumulator import Accumulator
from anybatch.gradients.contrastive import InfoNCE, clip_loss, info_nce
from anybatch.gradients.coupled import Coupled
from anybatch.gradients.criteria import supervised
from anybatch.gradients.huggingface import huggingface
from anybatch.gradients.metrics import Mean, Metric, Metrics, PerRow, Sum
from anybatch.gradients.norm_policy import BatchNorm
from anybatch.gradients.objective import Objective
from anybatch.gradients.row_dropout import row_dropout
from anybatch.gradients.sentence_transformers import sentence_transformers
from anybatch.gradients.window import Window
from anybatch.gradients.work import Autocast

__all__ = [
    "Accumulated",
    "Accumulator",
    "Autocast",
    "BatchNorm",
    "Coupled",
    "InfoNCE",
    "Mean",
    "Metric",
    "Metrics",
    "Objective",
    "PerRow",
    "Sum",
    "Window",
    "clip_loss",
    "huggingface",
    "info_nce",
    "row_dropout",
    "sentence_transformers",
    "supervised",
]
