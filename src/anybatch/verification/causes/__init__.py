"""Why an accumulated gradient differs: an experiment for each cause."""

from anybatch.verification.causes.changes import explain_draws
from anybatch.verification.causes.explain import Explanation, explain
