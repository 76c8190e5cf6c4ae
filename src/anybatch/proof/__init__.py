"""Accumulated against whole: the gradients compared, and the cause where they differ."""

from typing import TYPE_CHECKING

from anybatch.lazy import lazily

if TYPE_CHECKING:
    from anybatch.proof.cases import functions_of
    from anybatch.proof.checked_rows import CheckCost, check_cost
    from anybatch.proof.comparing import verify
    from anybatch.proof.first_batch import self_check
    from anybatch.proof.first_look import PENDING, FirstLook, look_first
    from anybatch.proof.floor import ParameterError
    from anybatch.proof.python_state import PythonState
    from anybatch.proof.verdict import Cause, CutResult, Verdict
else:
    __getattr__ = lazily(__name__)

__all__ = [
    "Cause",
    "CheckCost",
    "CutResult",
    "FirstLook",
    "PENDING",
    "ParameterError",
    "PythonState",
    "Verdict",
    "check_cost",
    "functions_of",
    "look_first",
    "self_check",
    "verify",
]
