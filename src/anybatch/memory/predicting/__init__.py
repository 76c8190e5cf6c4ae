"""The peak of every micro-batch size, from a few that were tried."""

from anybatch.memory.predicting.checkpointing import checkpointed, repeated_blocks
from anybatch.memory.predicting.largest_fitting import LargestFitting, find_largest_fitting
from anybatch.memory.predicting.memory_plan import Plan
from anybatch.memory.predicting.micro_batch_source import MicroBatchSource, micro_batch_source_of
from anybatch.memory.predicting.notes import notes_for
from anybatch.memory.predicting.plan_parts import Breakdown, Checkpointing, SizePeak
from anybatch.memory.predicting.trials import Trials, start_trials

__all__ = [
    "Breakdown",
    "Checkpointing",
    "LargestFitting",
    "MicroBatchSource",
    "Plan",
    "SizePeak",
    "Trials",
    "checkpointed",
    "find_largest_fitting",
    "micro_batch_source_of",
    "notes_for",
    "repeated_blocks",
    "start_trials",
]
