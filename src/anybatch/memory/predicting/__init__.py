"""The peak of every micro-batch size, from a few that were tried."""

from anybatch.memory.predicting.checkpointing import checkpointed, repeated_blocks
from anybatch.memory.predicting.largest_fitting import Found, find
from anybatch.memory.predicting.memory_plan import Breakdown, Checkpointing, Plan, SizePeak
from anybatch.memory.predicting.notes import notes_for
from anybatch.memory.predicting.source import Source, source_of
from anybatch.memory.predicting.trials import Trials, start_trials

__all__ = [
    "Breakdown",
    "Checkpointing",
    "Found",
    "Plan",
    "SizePeak",
    "Source",
    "Trials",
    "checkpointed",
    "find",
    "notes_for",
    "repeated_blocks",
    "source_of",
    "start_trials",
]
