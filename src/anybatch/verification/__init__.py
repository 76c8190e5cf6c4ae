"""Verification of accumulated gradients: `verify`, and the check of an update's first batch."""

from anybatch.verification.comparing import verify
from anybatch.verification.copies import functions_of
from anybatch.verification.first_look import look_first
from anybatch.verification.floor import ParameterDeviation, ParameterError
from anybatch.verification.python_state import PythonState
from anybatch.verification.verdict import Cause, CutResult, Verdict

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
