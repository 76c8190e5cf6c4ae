"""What `micro_batch=` may be given as."""

from numbers import Integral
from typing import Literal

from anybatch.core.micro_batches import CutsBatches, Split, derived
from anybatch.core.splits import Rows
from anybatch.errors import SplitError

MicroBatch = int | Split | CutsBatches | Literal["auto"]
"""A number of rows, a split, or "auto"."""


def as_split(micro_batch: MicroBatch) -> Split:
    """An int stands for `Rows(int)`, "auto" for a search by rate up to what `Fit()` allows; a split stands for itself."""
    if isinstance(micro_batch, Integral):
        return Rows(int(micro_batch))
    if isinstance(micro_batch, str) and micro_batch == "auto":
        from anybatch.core.plugins import auto_split

        return auto_split()
    if isinstance(micro_batch, CutsBatches) and not isinstance(micro_batch, type):
        return derived(micro_batch)
    raise SplitError(
        f"micro_batch={micro_batch!r} is not a split: give a number of rows, such as 16, a split, such as Rows(16), "
        'Tokens(8192) or Fit("6GiB"), or "auto".'
    )
