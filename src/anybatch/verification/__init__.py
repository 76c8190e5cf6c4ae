"""Verification of accumulated gradients: `verify`, and the check of an update's first batch."""

from anybatch.verification.first_batch_check import check_first_batch
from anybatch.verification.floor import ParameterDeviation, ParameterError
from anybatch.verification.state import PythonState, functions_of
from anybatch.verification.verdict import Cause, CutResult, Verdict
from anybatch.verification.verify import verify
