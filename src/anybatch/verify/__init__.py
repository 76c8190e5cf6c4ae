"""Proof that the accumulated gradient is the whole batch's, and the explanation where it is not."""

from anybatch.verify.floor import ParameterError
from anybatch.verify.proof import verify
from anybatch.verify.verdict import Cause, CutResult, Verdict

__all__ = ["Cause", "CutResult", "ParameterError", "Verdict", "verify"]
