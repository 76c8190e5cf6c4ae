"""One model, objective and batch, run on fresh copies in one way or another."""

from anybatch.proof.cases.case import Case, Gradient, make_case, norm_of
from anybatch.proof.cases.copies import Copy, copy_model, leaving_untouched, rounded_otherwise
from anybatch.proof.cases.float64 import ComparedPrecision, roundoff, why_not_float64
from anybatch.proof.cases.model_state import ModelState
from anybatch.proof.cases.objective_state import ObjectiveState, functions_of
from anybatch.proof.cases.row_draws import Draw, Draws, recording, replaying

__all__ = [
    "Case",
    "ComparedPrecision",
    "Copy",
    "Draw",
    "Draws",
    "Gradient",
    "ModelState",
    "ObjectiveState",
    "copy_model",
    "functions_of",
    "leaving_untouched",
    "make_case",
    "norm_of",
    "recording",
    "replaying",
    "rounded_otherwise",
    "roundoff",
    "why_not_float64",
]
