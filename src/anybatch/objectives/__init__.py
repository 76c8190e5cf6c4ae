"""How a loss is made, and what it averages over."""

from anybatch.objectives.contrastive import InfoNCE, clip_loss, info_nce
from anybatch.objectives.coupled import Coupled
from anybatch.objectives.criteria import FUNCTIONAL_RULES, supervised
from anybatch.objectives.labels import huggingface
from anybatch.objectives.metrics import Mean, Metric, Metrics, Number, PerRow, Sum, combine, detached, on_host
from anybatch.objectives.objective import Objective, checked_loss, count_units, loss_and_metrics
from anybatch.objectives.observed_means import ObservedMeans
from anybatch.objectives.sentence_losses import sentence_transformers

__all__ = [
    "Coupled",
    "FUNCTIONAL_RULES",
    "InfoNCE",
    "Mean",
    "Metric",
    "Metrics",
    "Number",
    "Objective",
    "ObservedMeans",
    "PerRow",
    "Sum",
    "checked_loss",
    "clip_loss",
    "combine",
    "count_units",
    "detached",
    "huggingface",
    "info_nce",
    "loss_and_metrics",
    "on_host",
    "sentence_transformers",
    "supervised",
]
