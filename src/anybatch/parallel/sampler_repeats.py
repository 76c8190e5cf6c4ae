"""Rows that are dealt twice: torch's `DistributedSampler` repeats some, so that every rank has as many."""

import warnings
from collections.abc import Sized
from typing import Any

from torch.utils.data import DistributedSampler


def repeated_rows(loader: Any) -> int:
    """How many rows of its dataset a loader, or its sampler, deals twice in every epoch over all ranks.

    Of torch's `DistributedSampler`; every other is taken to deal each row once.

    >>> repeated_rows(DistributedSampler(range(1001), num_replicas=4, rank=0))
    3
    """
    sampler = getattr(loader, "sampler", loader)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last or not isinstance(sampler.dataset, Sized):
        return 0
    return max(sampler.total_size - len(sampler.dataset), 0)


def warn_of_repeated_rows(loader: Any, *, rank: int, ranks: int) -> None:
    """Warn on the first of several ranks if the loader's sampler repeats rows, which then count twice in their updates."""
    repeated = repeated_rows(loader)
    if rank > 0 or ranks == 1 or not repeated:
        return
    rows = len(getattr(loader, "sampler", loader).dataset)
    warnings.warn(
        f"a DistributedSampler deals {rows} rows to {ranks} ranks and repeats {repeated} of them in every epoch, so "
        "that every rank has as many: repeated rows count twice. GlobalBatches(dataset, batch_size).loader() deals every row "
        f"once; DistributedSampler(drop_last=True) repeats none and leaves {rows % ranks} out.",
        stacklevel=2,
    )
