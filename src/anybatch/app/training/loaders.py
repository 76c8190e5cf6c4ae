"""Batches of a task: the training data in an order that seed and epoch decide, the validation data as they lie."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

from anybatch.app.training.tasks.task import Task
from anybatch.core import ONE_PROCESS, Ranks
from anybatch.errors import TaskError
from anybatch.parallel import GlobalBatches

T = TypeVar("T")


def all_batches(batches: Iterable[T], *, expected: int, data: str, done: int = 0) -> Iterator[T]:
    """The batches of an epoch, of which `done` were there before; an error where they end before there were `expected`.

    A dataset or a collate that raises StopIteration ends its loader as if the data had ended.
    """
    number = done
    for batch in batches:
        number += 1
        yield batch
    if number < expected:
        raise TaskError(
            f"the {data} data ended after {number} of {expected} batches. Its dataset, or its collate, raised StopIteration, "
            "which a loop takes for the end: let it raise another error, or say the true length in __len__."
        )


def first_batch(task: Task, *, batch: int, seed: int) -> Any:
    """The first batch of the training data."""
    loader = training_loader(task, batch=batch, seed=seed, epoch=1)
    return next(all_batches(loader, expected=1, data="training"))


def training_loader(task: Task, *, batch: int, seed: int, epoch: int) -> "StatefulDataLoader[Any]":
    """All rows once, shuffled; the order is a function of seed and epoch alone, and no other random state is drawn from."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    with _without_deprecations():
        return StatefulDataLoader(
            task.training, batch_size=batch, shuffle=True, generator=generator, collate_fn=task.collate
        )


def dealt_loader(
    task: Task, *, batch: int, seed: int, epoch: int, ranks: Ranks = ONE_PROCESS
) -> "StatefulDataLoader[Any]":
    """The batches of `training_loader`; each is a `Dealt` with the rows that are dealt to this rank.

    Where it is in the data is the same on every rank, and for any number of them.
    """
    batches = GlobalBatches(
        task.training,
        batch,
        rank=ranks.rank,
        ranks=ranks.size,
        seed=seed,
        lengths=task.lengths,
    )
    batches.set_epoch(epoch)
    generator = torch.Generator()  # of its own: a loader draws a number when it starts
    with _without_deprecations():
        loader: StatefulDataLoader[Any] = batches.loader(
            collate_fn=task.collate or default_collate, loader=StatefulDataLoader, generator=generator
        )
    return loader


def validation_loader(task: Task, ranks: Ranks = ONE_PROCESS) -> "DataLoader[Any]":
    """Every rank's batches of the validation data, whole and in turn: `validation_batch` rows as they lie, from rank 0 on.

    All ranks have the same number of batches. A rank that would have one less ends with the first batch once more.
    """
    size, count = task.validation_batch, len(task.validation)
    starts = list(range(0, count, size))
    starts += [0] * (-len(starts) % ranks.size)
    rows = [list(range(start, min(start + size, count))) for start in starts[ranks.rank :: ranks.size]]
    return DataLoader(task.validation, batch_sampler=rows, collate_fn=task.collate, generator=torch.Generator())


def validation_batches(task: Task, ranks: Ranks = ONE_PROCESS) -> Iterator[Any]:
    """The batches of `validation_loader`, all of them."""
    loader = validation_loader(task, ranks)
    return all_batches(loader, expected=len(loader), data="validation")


@contextmanager
def _without_deprecations() -> Iterator[None]:
    with warnings.catch_warnings():
        # torchdata 0.11 calls a function that torch 2.13 has deprecated
        warnings.filterwarnings("ignore", message=".*set_vital.*is deprecated")
        yield
