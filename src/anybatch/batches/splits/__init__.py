"""Splits: the policies that cut a batch into micro-batches, and what `micro_batch=` may be given as."""

from anybatch.batches.splits.belonging import Stacked, why_rows_stay
from anybatch.batches.splits.by_rows import Rows
from anybatch.batches.splits.by_tokens import Tokens
from anybatch.batches.splits.grouping import Windows, windows
from anybatch.batches.splits.micro_batch_option import MicroBatch, as_split
from anybatch.batches.splits.micro_batches import (
    Cut,
    Dealt,
    MicroBatches,
    Split,
    Workload,
    in_arrival_order,
    is_in_arrival_order,
)
from anybatch.batches.splits.shrinking import AsGiven, size_that_ran, smaller

__all__ = [
    "AsGiven",
    "Cut",
    "Dealt",
    "MicroBatch",
    "MicroBatches",
    "Rows",
    "Split",
    "Stacked",
    "Tokens",
    "Windows",
    "Workload",
    "as_split",
    "in_arrival_order",
    "is_in_arrival_order",
    "size_that_ran",
    "smaller",
    "why_rows_stay",
    "windows",
]
