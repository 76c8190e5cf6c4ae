"""What `micro_batch=` may be given as."""

from numbers import Integral
from typing import Literal

from anybatch.batches.auto import Auto
from anybatch.batches.splits import Rows, Split
from anybatch.errors import SplitError

MicroBatch = int | Split | Literal["auto"]
"""A number of rows, a split, or "auto"."""


def as_split(micro_batch: MicroBatch) -> Split:
    """An int stands for `Rows(int)`, "auto" for `Auto()`; a split stands for itself."""
    if isinstance(micro_batch, Integral):
        return Rows(int(micro_batch))
    if isinstance(micro_batch, str) and micro_batch == "auto":
        return Auto()
    if isinstance(micro_batch, Split) and not isinstance(micro_batch, type):
        return micro_batch
    raise SplitError(
        f"micro_batch={micro_batch!r} is not a split: give a number of rows, such as 16, a split, such as Rows(16) or "
        'Tokens(8192), or "auto".'
    )
