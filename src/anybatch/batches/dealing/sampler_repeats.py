"""Rows that are dealt twice: torch's `DistributedSampler` repeats some, so that every rank has as many."""

import gc
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


class RepeatsWatch:
    """Says once, at the first batch, that a sampler of this process repeats rows: those count double in their updates."""

    def __init__(self) -> None:
        self._has_looked = False

    def look(self, *, rank: int, ranks: int) -> None:
        """Look for samplers for so many ranks.

        An update sees batches and no loader. So all that is alive is gone through: some hundredths of a second, once.
        """
        if self._has_looked:
            return
        self._has_looked = True
        if rank > 0 or ranks == 1:
            return  # one rank speaks for all
        for sampler in gc.get_objects():
            is_sampler = issubclass(
                type(sampler), DistributedSampler
            )  # not isinstance: proxies answer for what is gone
            if is_sampler and sampler.num_replicas == ranks and repeated_rows(sampler):
                _warn(repeated_rows(sampler), len(sampler.dataset), ranks)
                return


def _warn(repeated: int, rows: int, ranks: int) -> None:
    warnings.warn(
        f"a DistributedSampler deals {rows} rows to {ranks} ranks and repeats {repeated} of them in every epoch, so that every "
        f"rank has as many: repeated rows count twice. GlobalBatches(dataset, batch_size).loader() deals every row once; "
        f"DistributedSampler(drop_last=True) repeats none and leaves {rows % ranks} out.",
        stacklevel=2,
    )
