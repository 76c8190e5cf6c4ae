"""Verification of accumulated gradients: `verify`, and the check of an update's first batch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anybatch.proof.comparing import verify
    from anybatch.proof.copies import functions_of
    from anybatch.proof.first_look import PENDING, FirstLook, look_first
    from anybatch.proof.floor import ParameterDeviation, ParameterError
    from anybatch.proof.python_state import PythonState
    from anybatch.proof.verdict import Cause, CutResult, Verdict

__all__ = [
    "Cause",
    "CutResult",
    "FirstLook",
    "PENDING",
    "ParameterDeviation",
    "ParameterError",
    "PythonState",
    "Verdict",
    "functions_of",
    "look_first",
    "verify",
]
_MODULES = {
    "cases": ("functions_of",),
    "checked_rows": ("CheckCost", "check_cost"),
    "comparing": ("verify",),
    "first_batch": ("self_check",),
    "first_look": ("PENDING", "FirstLook", "look_first"),
    "floor": ("ParameterError",),
    "python_state": ("PythonState",),
    "verdict": ("Cause", "CutResult", "Verdict"),
}
"""The names of each module, which is loaded when one of them is first asked for: most of them load torch."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        for module, names in _MODULES.items():
            if name in names:
                return getattr(import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
