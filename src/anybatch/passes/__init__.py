"""The engine: the passes of a batch, and the gradient that they leave."""

from anybatch.passes.accumulated import Accumulated
from anybatch.passes.accumulator import Accumulator
from anybatch.passes.agreement import has_rows
from anybatch.passes.culprit import find_culprit
from anybatch.passes.forward_pass import ForwardPass
from anybatch.passes.learner import autocast_context, check_model, common_device
from anybatch.passes.running import Option, Running, check_of, in_a_line, says_what_to_write

__all__ = [
    "Accumulated",
    "Accumulator",
    "ForwardPass",
    "Option",
    "Running",
    "autocast_context",
    "check_model",
    "check_of",
    "common_device",
    "find_culprit",
    "has_rows",
    "in_a_line",
    "says_what_to_write",
]
