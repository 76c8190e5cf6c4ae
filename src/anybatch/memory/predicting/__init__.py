"""The peak of every micro-batch size, from a few that were tried."""

from anybatch.memory.predicting.checkpointing import recompute_blocks
from anybatch.memory.predicting.largest_fitting import LargestFitting, find_largest_fitting
from anybatch.memory.predicting.memory_plan import Breakdown, Checkpointing, Plan, SizePeak
from anybatch.memory.predicting.micro_batch_source import MicroBatchSource, micro_batch_source_of
from anybatch.memory.predicting.trials import Trials, available_bytes, notes_for, start_trials
from anybatch.memory.predicting.ways_to_fit import WayToFit, find_ways, model_bytes

__all__ = [
    "Breakdown",
    "Checkpointing",
    "LargestFitting",
    "MicroBatchSource",
    "Plan",
    "SizePeak",
    "Trials",
    "WayToFit",
    "available_bytes",
    "find_largest_fitting",
    "find_ways",
    "micro_batch_source_of",
    "model_bytes",
    "notes_for",
    "recompute_blocks",
    "start_trials",
]
