"""Why an accumulated gradient differs: an experiment for each cause."""

from anybatch.verification.causes.experiments import Experiments, weights_of_rows
from anybatch.verification.causes.explaining import Explanation, explain
from anybatch.verification.causes.randomness import explain_draws

__all__ = ["Experiments", "Explanation", "explain", "explain_draws", "weights_of_rows"]
