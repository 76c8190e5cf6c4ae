"""What a batch is: its rows, taking them, cutting it into micro-batches. Pure: no autograd here."""

from anybatch.batches.counting import RowNumbers, move, num_rows, rows, take_rows
from anybatch.batches.joining import join_rows
from anybatch.batches.nesting import Batch, map_tensors, tensors
from anybatch.batches.splits import MicroBatches, Rows, Split, as_split
from anybatch.batches.windows import Windows, windows

__all__ = [
    "Batch",
    "MicroBatches",
    "RowNumbers",
    "Rows",
    "Split",
    "Windows",
    "as_split",
    "join_rows",
    "map_tensors",
    "move",
    "num_rows",
    "rows",
    "take_rows",
    "tensors",
    "windows",
]
