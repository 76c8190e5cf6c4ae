"""Dropout whose masks depend on the row of the batch, and on neither the cut nor the ranks."""

from anybatch.dropout.keyed_dropout import Masks, count_update, hold_numbers, masks_of, row_dropout, rows_running
from anybatch.dropout.row_numbering import number_rows

__all__ = [
    "Masks",
    "count_update",
    "hold_numbers",
    "masks_of",
    "number_rows",
    "row_dropout",
    "rows_running",
]
