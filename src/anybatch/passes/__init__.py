"""The engine: the passes of a batch, and the gradient that they leave."""

from anybatch.passes.accumulated import Accumulated
from anybatch.passes.accumulator import Accumulator
from anybatch.passes.agreement import has_rows
from anybatch.passes.checks import check_model
from anybatch.passes.culprit import find_culprit
from anybatch.passes.norm_policy import BatchNorm
from anybatch.passes.over_ranks import on_host
from anybatch.passes.work import Autocast, autocast_context, common_device

__all__ = [
    "Accumulated",
    "Accumulator",
    "Autocast",
    "BatchNorm",
    "autocast_context",
    "check_model",
    "common_device",
    "find_culprit",
    "has_rows",
    "on_host",
]
