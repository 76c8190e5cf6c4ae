"""One model, objective and batch, run on fresh copies in one way or another."""

from anybatch.proof.cases.case import Case, Gradient, make_case, size
from anybatch.proof.cases.float64 import Precision, can_be_raised, roundoff
from anybatch.proof.cases.model_state import ModelState, closure_state
from anybatch.proof.cases.twins import Copy, copy_model, untouched

__all__ = [
    "Case",
    "Copy",
    "Gradient",
    "ModelState",
    "Precision",
    "can_be_raised",
    "closure_state",
    "copy_model",
    "make_case",
    "roundoff",
    "size",
    "untouched",
]
