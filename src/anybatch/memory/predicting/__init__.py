"""The peak of every micro-batch size, from a few that were tried."""

from anybatch.memory.predicting.checkpointing import Recomputing, recomputing_of, repeated_blocks
from anybatch.memory.predicting.envelope import PassShape
from anybatch.memory.predicting.largest_fitting import LargestFitting, find_largest_fitting, largest_of
from anybatch.memory.predicting.memory_plan import Plan
from anybatch.memory.predicting.micro_batch_source import MicroBatchSource, micro_batch_source_of
from anybatch.memory.predicting.more_rows import for_more_rows
from anybatch.memory.predicting.notes import notes_for
from anybatch.memory.predicting.plan_parts import Breakdown, Checkpointing, RankedWay, SizePeak
from anybatch.memory.predicting.trials import Trials, start_trials
from anybatch.memory.predicting.ways_to_fit import WayToFit, find_ways, model_bytes

__all__ = [
    "Breakdown",
    "Checkpointing",
    "LargestFitting",
    "MicroBatchSource",
    "PassShape",
    "Plan",
    "RankedWay",
    "Recomputing",
    "SizePeak",
    "Trials",
    "WayToFit",
    "find_largest_fitting",
    "find_ways",
    "for_more_rows",
    "largest_of",
    "micro_batch_source_of",
    "model_bytes",
    "notes_for",
    "recomputing_of",
    "repeated_blocks",
    "start_trials",
]
