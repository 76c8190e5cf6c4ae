"""Verification of accumulated gradients: `verify`, and the check of an update's first batch."""

from anybatch.proof.comparing import verify
from anybatch.proof.copies import functions_of
from anybatch.proof.first_look import look_first
from anybatch.proof.floor import ParameterDeviation, ParameterError
from anybatch.proof.python_state import PythonState
from anybatch.proof.verdict import Cause, CutResult, Verdict

__all__ = [
    "Cause",
    "CutResult",
    "ParameterDeviation",
    "ParameterError",
    "PythonState",
    "Verdict",
    "functions_of",
    "look_first",
    "verify",
]
