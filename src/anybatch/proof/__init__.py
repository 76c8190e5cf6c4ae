"""Proof that the accumulated gradient is the whole batch's, and the explanation where it is not."""

from anybatch.proof.comparing import verify
from anybatch.proof.first_batch import self_check
from anybatch.proof.floor import ParameterError
from anybatch.proof.verdict import Cause, CutResult, Verdict

__all__ = ["Cause", "CutResult", "ParameterError", "Verdict", "self_check", "verify"]
