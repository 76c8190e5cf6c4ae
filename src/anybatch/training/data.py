"""Batches of a task: the training data in an order that seed and epoch decide, the validation data as they lie."""

import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from anybatch.training.task import Task


def training_loader(task: Task, *, batch: int, seed: int, epoch: int) -> "StatefulDataLoader[Any]":
    """All rows once, shuffled; the order is a function of seed and epoch alone, and no other random state is drawn from."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    with warnings.catch_warnings():
        # torchdata 0.11 calls a function that torch 2.13 has deprecated
        warnings.filterwarnings("ignore", message=".*set_vital.*is deprecated")
        return StatefulDataLoader(
            task.training, batch_size=batch, shuffle=True, generator=generator, collate_fn=task.collate
        )


def validation_loader(task: Task) -> "DataLoader[Any]":
    """All rows of the validation data in their order, `validation_batch` at a time."""
    generator = torch.Generator()  # of its own: a loader draws a number when it starts
    return DataLoader(task.validation, batch_size=task.validation_batch, collate_fn=task.collate, generator=generator)
