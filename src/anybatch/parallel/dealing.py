"""`GlobalBatches`: the same batches for any number of ranks, each row dealt to exactly one rank."""

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import replace
from functools import partial
from heapq import heapreplace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, Sampler, default_collate

from anybatch.core import Batch, Dealt
from anybatch.display import called
from anybatch.errors import BatchError, CheckpointError
from anybatch.ragged import Cost

Order = Callable[[int], Sequence[int]]
"""Function of the epoch that returns its rows in order, the same on all ranks."""

State = dict[str, int]


class GlobalBatches(Sampler[list[int]]):
    """Batch sampler for torch's `DataLoader`: batches of `batch_size` rows over all ranks; the last may be shorter.

    The rows of a batch depend on seed and epoch alone, so that any number of ranks learns from the same batches. Every rank
    gets the same number of batches; a batch with fewer rows than ranks is an empty list for some. `loader()` makes a loader
    that handles this and says which rows of the batch a rank has.

    Each iteration is the next epoch. `state_dict` holds the position of the last one, and `load_state_dict` starts the next one
    there, on any number of ranks. Workers of a plain `DataLoader` fetch ahead of training; to resume with workers, use
    torchdata's `StatefulDataLoader`, which counts the batches it handed out.

    Args:
        dataset: Dataset with a length.
        batch_size: Rows per batch, over all ranks.
        rank: This process; that of torch.distributed by default.
        ranks: Number of processes; that of torch.distributed, or 1, by default.
        seed: Seed of the order of rows.
        shuffle: Draw a new order in each epoch; else rows come in the order of the dataset.
        order: Function of the epoch that returns its rows in order, instead of `shuffle` and `seed`.
        lengths: Length of each row of the dataset, or a function of the dataset that returns them. Rows are then dealt so that
            ranks have equal work; by default, near-equal numbers of rows.
        cost: Cost of a row by its length.

    Raises:
        BatchError: If an argument is out of range.

    >>> [[len(rows) for rows in GlobalBatches(range(104), 64, rank=rank, ranks=3)] for rank in range(3)]
    [[22, 14], [21, 13], [21, 13]]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        rank: int | None = None,
        ranks: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        order: Order | None = None,
        lengths: Sequence[int] | Callable[[Any], Sequence[int]] | None = None,
        cost: Cost | None = None,
    ) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise BatchError(f"batch_size={batch_size!r}: expected a whole number of rows over all ranks, 1 or more.")
        self.dataset = dataset
        self.batch_size = batch_size
        self.rank, self.ranks = _place(rank, ranks)
        self.seed = seed
        self.shuffle = shuffle
        self.order = order
        self.cost = cost or Cost()
        lengths = lengths(dataset) if callable(lengths) else lengths
        self.lengths = None if lengths is None else [int(length) for length in lengths]
        if self.lengths is not None and len(self.lengths) != len(dataset):
            raise BatchError(
                f"lengths= has {len(self.lengths)} entries for {len(dataset)} rows; give one length per row of the dataset, or "
                "a function of the dataset that returns them."
            )
        self.epoch = 0
        self._begin = 0
        self._last: _EpochPass | None = None

    def __repr__(self) -> str:
        given = {"batch_size": self.batch_size, "rank": self.rank, "ranks": self.ranks}
        return called("GlobalBatches", f"{len(self.dataset)} rows", **given)

    def __len__(self) -> int:
        count = len(self.dataset) if self.order is None else len(self.order(self.epoch))
        return -(-count // self.batch_size)

    def __iter__(self) -> "_EpochPass":
        self._last = _EpochPass(self, self.epoch, self._begin)
        self._begin = 0
        return self._last

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the first batch of this epoch.

        Args:
            epoch: Number of the epoch.
        """
        self.epoch, self._begin, self._last = epoch, 0, None

    def state_dict(self) -> State:
        """Return the position of the last iteration; it does not depend on the ranks."""
        return self._state(self.epoch, self._begin) if self._last is None else self._last.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Start the next iteration at a saved position.

        Args:
            state: What `state_dict()` returned, on any rank.

        Raises:
            CheckpointError: If it was saved with another dataset, batch size or seed.
        """
        self.epoch, self._begin = self._position(state)
        self._last = None

    def loader(
        self,
        *,
        collate_fn: Callable[[list[Any]], Batch] = default_collate,
        loader: Callable[..., Any] = DataLoader,
        **options: Any,
    ) -> Any:
        """Make a loader of `Dealt`: this rank's part of each batch, with the numbers of its rows in the batch.

        Args:
            collate_fn: Makes a batch of a list of samples.
            loader: torch's `DataLoader` or torchdata's `StatefulDataLoader`.
            **options: Further arguments of the loader.

        Returns:
            What `loader` returns.
        """
        return loader(_Numbered(self.dataset), batch_sampler=self, collate_fn=partial(_collate, collate_fn), **options)

    def rows_of(self, epoch: int) -> list[int]:
        """List the rows of the dataset in the order of `epoch`."""
        if self.order is not None:
            return [int(row) for row in self.order(epoch)]
        if not self.shuffle:
            return list(range(len(self.dataset)))
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        return torch.randperm(len(self.dataset), generator=generator).tolist()

    def deal(self, batch: Sequence[int]) -> list[tuple[int, ...]]:
        """List, by rank, the places in `batch`, a list of rows of the dataset, that each rank gets."""
        if self.lengths is None:
            return deal_rows(len(batch), self.ranks)
        return deal_by_cost([self.lengths[row] for row in batch], self.ranks, self.cost)

    def _state(self, epoch: int, batch: int) -> State:
        own = {"batch_size": self.batch_size, "rows": len(self.dataset), "seed": self.seed}
        return {"epoch": epoch, "batch": batch, **own}

    def _position(self, state: State) -> tuple[int, int]:
        for name, value in self._state(state["epoch"], state["batch"]).items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"this position in the data was saved with {name}={state.get(name)!r}, and this run has {value!r}: its "
                    "batches would be others. Resume with the dataset, batch_size and seed that it was saved with."
                )
        return state["epoch"], state["batch"]


def _place(rank: int | None, ranks: int | None) -> tuple[int, int]:
    """Return (rank, number of ranks): as given, else from torch.distributed, else of one process."""
    is_running = dist.is_available() and dist.is_initialized()
    ranks = ranks if ranks is not None else dist.get_world_size() if is_running else 1
    rank = rank if rank is not None else dist.get_rank() if is_running else 0
    if not 0 <= rank < ranks:
        raise BatchError(
            f"rank={rank} of ranks={ranks}: expected a rank from 0 to {max(ranks, 1) - 1}. Give both, or neither once "
            "torch.distributed.init_process_group was called."
        )
    return rank, ranks


class _EpochPass(Iterator[list[int]]):
    """One rank's iteration over one epoch. torchdata saves its state after each batch."""

    def __init__(self, batches: GlobalBatches, epoch: int, batch: int) -> None:
        self._batches = batches
        self._go_to(epoch, batch)

    def __next__(self) -> "DealtRows":
        batches, size = self._batches, self._batches.batch_size
        batch = self._rows[self._batch * size : (self._batch + 1) * size]
        if not batch:
            if batches._last is self and batches.epoch == self._epoch:
                batches.set_epoch(self._epoch + 1)
            raise StopIteration
        self._batch += 1
        return DealtRows(batch, batches.deal(batch)[batches.rank])

    def state_dict(self) -> State:
        return self._batches._state(self._epoch, self._batch)

    def load_state_dict(self, state: State) -> None:
        self._go_to(*self._batches._position(state))

    def _go_to(self, epoch: int, batch: int) -> None:
        self._epoch, self._batch = epoch, batch
        self._rows = self._batches.rows_of(epoch)


class DealtRows(list[int]):
    """Rows of the dataset dealt to one rank; `row_numbers` are their places in `batch`."""

    def __init__(self, batch: Sequence[int], row_numbers: tuple[int, ...]) -> None:
        super().__init__(batch[row] for row in row_numbers)
        self.row_numbers = row_numbers
        self.num_rows = len(batch)
        self.stand_in = batch[0]


class _Numbered:
    """The dataset indexed by `DealtRows`; returns samples with their row numbers."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, deal: DealtRows) -> Dealt:
        wanted = list(deal) or [deal.stand_in]
        fetch = getattr(self.dataset, "__getitems__", None)
        samples = [self.dataset[row] for row in wanted] if fetch is None else fetch(wanted)
        return Dealt(samples, deal.row_numbers, deal.num_rows)


def _collate(collate: Callable[[list[Any]], Batch], samples: Dealt) -> Dealt:
    return replace(samples, batch=collate(samples.batch))


def deal_rows(count: int, ranks: int) -> list[tuple[int, ...]]:
    """List the row numbers of each rank: consecutive, near-equal in number, longer parts first.

    >>> [len(rows) for rows in deal_rows(40, 3)], deal_rows(2, 3)
    ([14, 13, 13], [(0,), (1,), ()])
    """
    shortest, num_longer = divmod(count, ranks)
    starts = [rank * shortest + min(rank, num_longer) for rank in range(ranks + 1)]
    return [tuple(range(start, stop)) for start, stop in itertools.pairwise(starts)]


def deal_by_cost(lengths: Sequence[int], ranks: int, cost: Cost) -> list[tuple[int, ...]]:
    """List the row numbers of each rank, ascending, so that the rows of all ranks cost about the same.

    Rows are dealt longest first, each to the rank with the least cost so far. Padding and fixed cost of each rank's own split
    are ignored: exchanging rows to balance them too gained 0 to 5 %.

    >>> deal_by_cost([9, 1, 1, 2, 5, 1], 2, Cost())
    [(0,), (1, 2, 3, 4, 5)]
    """
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]  # a heap
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if lengths[row] < 1:
            raise BatchError(
                f"row {row} is {lengths[row]} tokens long; expected 1 or more. Drop the row, or mend lengths=."
            )
        load, rank = loads[0]
        parts[rank].append(row)
        heapreplace(loads, (load + cost.of_row(lengths[row]), rank))
    return [tuple(sorted(part)) for part in parts]


def repeated_rows(loader: Any) -> int:
    """Count the rows that a loader deals twice in every epoch over all ranks.

    Only torch's `DistributedSampler` is known to repeat rows; any other sampler counts 0.

    Args:
        loader: A loader, or its sampler.

    Returns:
        Number of repeated rows.

    >>> repeated_rows(DistributedSampler(range(1001), num_replicas=4, rank=0))
    3
    """
    sampler = getattr(loader, "sampler", loader)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last or not isinstance(sampler.dataset, Sized):
        return 0
    return max(sampler.total_size - len(sampler.dataset), 0)


def warn_of_repeated_rows(loader: Any, *, rank: int, ranks: int) -> None:
    """Warn on rank 0 if the loader's sampler repeats rows, which then count twice in their updates."""
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
