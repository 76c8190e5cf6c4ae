"""One model, objective and batch, run on fresh copies in one way or another."""

from anybatch.proof.cases.case import Case, make_case
from anybatch.proof.cases.copies import Copy, copy_batch, copy_model, leaving_untouched, rounded_otherwise
from anybatch.proof.cases.gradient import Gradient, GradientAside, distance, norm_of
from anybatch.proof.cases.model_state import ModelState
from anybatch.proof.cases.objective_state import ObjectiveState, functions_of
from anybatch.proof.cases.raised import (
    ComparedPrecision,
    is_below,
    raised_dtype,
    roundoff,
    why_not_float64,
    why_not_raised,
)
from anybatch.proof.cases.row_draws import Draw, Draws, recording, replaying
from anybatch.proof.cases.shared_weights import SharedWeights

__all__ = [
    "Case",
    "ComparedPrecision",
    "Copy",
    "Draw",
    "Draws",
    "Gradient",
    "GradientAside",
    "ModelState",
    "ObjectiveState",
    "SharedWeights",
    "copy_batch",
    "copy_model",
    "distance",
    "functions_of",
    "is_below",
    "leaving_untouched",
    "make_case",
    "norm_of",
    "raised_dtype",
    "recording",
    "replaying",
    "rounded_otherwise",
    "roundoff",
    "why_not_float64",
    "why_not_raised",
]
