"""Why an accumulated gradient differs: an experiment for each cause."""

from anybatch.proof.causes.experiments import Experiments
from anybatch.proof.causes.explaining import Explanation, explain
from anybatch.proof.causes.randomness import explain_draws
from anybatch.proof.causes.weighing_parts import weights_of_rows

__all__ = [
    "Experiments",
    "Explanation",
    "explain",
    "explain_draws",
    "weights_of_rows",
]
