"""What a batch is: its rows, cutting it into micro-batches, what those cost, dealing them to ranks. No autograd here."""

from anybatch.batches.cost import Cost, Cut, best_cut
from anybatch.batches.counting import num_rows, rows, take_rows
from anybatch.batches.dealing import Dealt, GlobalBatches, deal_rows, repeated_rows, warn_of_repeated_rows
from anybatch.batches.joining import join_rows, reorder_rows
from anybatch.batches.lengths import RowLengths
from anybatch.batches.nesting import Batch, children, is_array, map_tensors, tensors
from anybatch.batches.padding import narrow, padded_dims
from anybatch.batches.readings import SampleList, holds_samples
from anybatch.batches.row_dim import check_row_dim, rows_first, rows_in_dim
from anybatch.batches.sending import move, sent
from anybatch.batches.splits import (
    AsGiven,
    MicroBatch,
    MicroBatches,
    Rows,
    Split,
    Stacked,
    Tokens,
    Windows,
    Workload,
    as_split,
    in_arrival_order,
    is_in_arrival_order,
    size_that_ran,
    smaller,
    why_rows_stay,
    windows,
)
from anybatch.batches.tuning import Auto, Choice, Doubling, WayBack

__all__ = [
    "AsGiven",
    "Auto",
    "Batch",
    "Choice",
    "Cost",
    "Cut",
    "Dealt",
    "Doubling",
    "GlobalBatches",
    "MicroBatch",
    "MicroBatches",
    "RowLengths",
    "Rows",
    "SampleList",
    "Split",
    "Stacked",
    "Tokens",
    "WayBack",
    "Windows",
    "Workload",
    "as_split",
    "best_cut",
    "check_row_dim",
    "children",
    "deal_rows",
    "holds_samples",
    "in_arrival_order",
    "is_array",
    "is_in_arrival_order",
    "join_rows",
    "map_tensors",
    "move",
    "narrow",
    "num_rows",
    "padded_dims",
    "reorder_rows",
    "repeated_rows",
    "rows",
    "rows_first",
    "rows_in_dim",
    "sent",
    "size_that_ran",
    "smaller",
    "take_rows",
    "tensors",
    "warn_of_repeated_rows",
    "why_rows_stay",
    "windows",
]
