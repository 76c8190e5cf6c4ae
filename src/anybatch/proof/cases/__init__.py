"""One model, objective and batch, run on fresh copies in one way or another."""

from anybatch.proof.cases.case import Case, Gradient, make_case, norm_of
from anybatch.proof.cases.copies import Copy, copy_model, inner_model, leaving_untouched, outer_states, restore_outer
from anybatch.proof.cases.float64 import ComparedPrecision, roundoff, why_not_float64
from anybatch.proof.cases.model_state import ModelState, closure_state

__all__ = [
    "Case",
    "Copy",
    "Gradient",
    "ModelState",
    "ComparedPrecision",
    "why_not_float64",
    "closure_state",
    "copy_model",
    "inner_model",
    "make_case",
    "outer_states",
    "restore_outer",
    "roundoff",
    "norm_of",
    "leaving_untouched",
]
