"""Raw samples, collated micro-batch by micro-batch."""

from collections.abc import Callable
from typing import Any

from anybatch.core.nesting import Batch
from anybatch.core.readings import as_samples
from anybatch.errors import SplitError


def samples_of(batch: Batch, split: str) -> list[Any] | tuple[Any, ...]:
    """The samples of a batch that nobody has collated."""
    if not isinstance(batch, (list, tuple)) or not batch:
        raise SplitError(
            f"{split}(collate=...) cuts a list of raw samples, got a {type(batch).__name__}. Give the loader "
            "collate_fn=list, or leave collate=None for batches that are collated already."
        )
    return batch


def collated(collate: Callable[[list[Any]], Batch], samples: list[Any]) -> Batch:
    """What `collate` makes of samples. Where it leaves them a list of as many, that is one per row, and says so."""
    made = collate(samples)
    return as_samples(made) if type(made) is list and len(made) == len(samples) else made
