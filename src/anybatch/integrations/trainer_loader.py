"""The loader of a Trainer on several ranks: every row dealt to one rank, none twice and none dropped, in the order it had."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

from anybatch.core import Dealt
from anybatch.errors import ParallelError
from anybatch.integrations.trainer_window import StandIn
from anybatch.parallel import GlobalBatches, warn_of_repeated_rows

KNOWN_TO_ALL = ("SeedableRandomSampler", "SequentialSampler")
"""Samplers that give every rank the same rows."""


MIXED = ("ProportionalBatchSampler", "RoundRobinBatchSampler")
"""Samplers of sentence-transformers whose every batch is of another dataset."""


class EpochLoader(DataLoader[Any]):
    """A loader that is told which epoch it is; so its batch sampler is."""

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


def dealt_loader(loader: Any, *, rank: int, ranks: int, drop_last: bool, is_forced: bool = False) -> Any:
    """The loader that Accelerate prepared, dealt by `GlobalBatches` instead: full batches go to the same ranks as before.

    Of the last, which Accelerate fills up with rows that came before, each rank gets its part. A loader that is not one of
    rows by number (a stream), or that drops its tail, stays as it is; unless that is forced upon it on several ranks, for fear
    of a tail that not all of them have.
    """
    shards = getattr(loader, "batch_sampler", None)
    batches: Any = getattr(shards, "batch_sampler", None)
    is_dropped = drop_last and not is_forced
    if isinstance(loader, EpochLoader) or ranks == 1 or is_dropped or type(shards).__name__ != "BatchSamplerShard":
        warn_of_repeated_rows(loader, rank=rank, ranks=ranks)
        return loader
    if drop_last:
        batches.drop_last = False
    if type(batches).__name__ in MIXED:
        raise ParallelError(
            f"this loader takes batches from several datasets in turn ({type(batches).__name__}), which exact() cannot deal to "
            f"{ranks} ranks row by row. Train on one dataset, or on one rank."
        )
    size = _size_of(batches)
    dealt = GlobalBatches(loader.dataset, size * ranks, rank=rank, ranks=ranks, order=_Order(batches))
    options = {
        name: getattr(loader, name)
        for name in ("num_workers", "pin_memory", "worker_init_fn", "multiprocessing_context", "prefetch_factor")
    }
    return dealt.loader(
        collate_fn=loader.collate_fn, loader=EpochLoader, persistent_workers=loader.persistent_workers, **options
    )


def rows_of(batch: Any) -> Any:
    """A batch as a Trainer takes it: what was dealt to this rank, or a stand-in for it."""
    if not isinstance(batch, Dealt):
        return batch
    return StandIn(batch.batch) if batch.is_stand_in else batch.batch


def _size_of(batches: Any) -> int:
    size = getattr(batches, "batch_size", None)
    return size if isinstance(size, int) else max(len(batch) for batch in batches)


class _Order:
    """The rows of an epoch as a batch sampler gives them, asked for once per epoch."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        self._known: tuple[int, list[int]] = (-1, [])

    def __call__(self, epoch: int) -> list[int]:
        if self._known[0] != epoch:
            self._known = epoch, self._rows(epoch)
        return self._known[1]

    def _rows(self, epoch: int) -> list[int]:
        sampler = getattr(self.batches, "sampler", None)
        for one in (self.batches, sampler):
            set_epoch: Callable[[int], None] | None = getattr(one, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
        if type(sampler).__name__ in KNOWN_TO_ALL:
            return list(chain.from_iterable(self.batches))
        drawn = [list(chain.from_iterable(self.batches)) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(drawn, src=0)
        return drawn[0] or []
