"""What a batch is: its rows, taking them, cutting it into micro-batches. Pure: no autograd here."""

from anybatch.batches.auto import Auto, Choice
from anybatch.batches.costs import Cost
from anybatch.batches.counting import RowNumbers, move, num_rows, rows, take_rows
from anybatch.batches.cutting import Cut, best_cut
from anybatch.batches.dealing import Dealt, deal_rows, deal_work
from anybatch.batches.global_batches import GlobalBatches
from anybatch.batches.joining import join_rows
from anybatch.batches.nesting import Batch, map_tensors, tensors
from anybatch.batches.shrinking import AsGiven, smaller
from anybatch.batches.spelling import MicroBatch, as_split
from anybatch.batches.splits import Learner, MicroBatches, Rows, Split
from anybatch.batches.tokens import Tokens
from anybatch.batches.windows import Windows, windows

__all__ = [
    "AsGiven",
    "Auto",
    "Batch",
    "Choice",
    "Cost",
    "Cut",
    "Dealt",
    "GlobalBatches",
    "Learner",
    "MicroBatch",
    "MicroBatches",
    "RowNumbers",
    "Rows",
    "Split",
    "Tokens",
    "Windows",
    "as_split",
    "best_cut",
    "deal_rows",
    "deal_work",
    "join_rows",
    "map_tensors",
    "move",
    "num_rows",
    "rows",
    "smaller",
    "take_rows",
    "tensors",
    "windows",
]
