"""Why an accumulated gradient differs: an experiment for each cause."""

from anybatch.proof.causes.experiments import Experiments, weights_of_rows
from anybatch.proof.causes.explaining import Explanation, explain
from anybatch.proof.causes.randomness import explain_draws

__all__ = ["Experiments", "Explanation", "explain", "explain_draws", "weights_of_rows"]
