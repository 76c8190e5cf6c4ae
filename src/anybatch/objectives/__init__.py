"""How a loss is made, and what it averages over."""

from anybatch.loss_units import FUNCTIONAL_RULES
from anybatch.objectives.contrastive import InfoNCE, clip_loss, info_nce
from anybatch.objectives.criteria import supervised
from anybatch.objectives.labels import huggingface, label_units
from anybatch.objectives.metrics import (
    Mean,
    Metric,
    Metrics,
    Number,
    PerRow,
    Sum,
    by_itself,
    combine,
    detached,
    on_host,
)
from anybatch.objectives.objective import (
    Coupled,
    Objective,
    PartLoss,
    SeenLoss,
    TermLosses,
    TermPlace,
    Units,
    checked_loss,
    count_terms,
    count_units,
    loss_and_metrics,
    part_loss,
)
from anybatch.objectives.observed_means import ObservedMeans, WatchedLoss, learned, observed
from anybatch.objectives.sentence_losses import sentence_transformers
from anybatch.objectives.terms import Terms

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
    "PartLoss",
    "PerRow",
    "SeenLoss",
    "Sum",
    "TermLosses",
    "TermPlace",
    "Terms",
    "Units",
    "WatchedLoss",
    "by_itself",
    "checked_loss",
    "clip_loss",
    "combine",
    "count_terms",
    "count_units",
    "detached",
    "huggingface",
    "info_nce",
    "label_units",
    "learned",
    "loss_and_metrics",
    "observed",
    "on_host",
    "part_loss",
    "sentence_transformers",
    "supervised",
]
