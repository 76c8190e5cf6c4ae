"""Why an accumulated gradient differs: an experiment for each cause."""

from anybatch.proof.causes.experiments import Experiments
from anybatch.proof.causes.explaining import explain

__all__ = [
    "Experiments",
    "explain",
]
