"""scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, and a small convolutional net with BatchNorm.

With BatchNorm the rows of a batch depend on each other. Micro-batches of 16 run in lockstep and are normalised by the
statistics of all 64 rows, so the gradient is exact.
"""

import gzip
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from anybatch.app.training.tasks.task import Task
from anybatch.app.training.tasks.textbook import accuracy
from anybatch.core import supervised

_FOUND = find_spec("sklearn")
if _FOUND is None or _FOUND.origin is None:
    raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
_SKLEARN = Path(_FOUND.origin).parent  # not imported: that takes as long as importing torch


def task() -> Task:
    lines = gzip.decompress((_SKLEARN / "datasets" / "data" / "digits.csv.gz").read_bytes()).split()
    rows = torch.tensor([[int(value) for value in line.split(b",")] for line in lines])
    images, targets = rows[:, :64].reshape(-1, 1, 8, 8) / 16, rows[:, 64]
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(1))
    learned, held_out = order[:1437], order[1437:]  # four fifths, the same for every seed
    model = nn.Sequential(
        *_block(1, 24),
        *_block(24, 48),
        nn.MaxPool2d(2),
        *_block(48, 64),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )
    return Task(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01),
        objective=supervised(nn.CrossEntropyLoss(), metrics=accuracy),
        training=TensorDataset(images[learned], targets[learned]),
        validation=TensorDataset(images[held_out], targets[held_out]),
        metric="accuracy",
        batch_size=64,
        micro_batch=16,
        batch_norm="exact",
        epochs=12,
        warmup=10,
        decay="cosine",
    )


def _block(channels_in: int, channels_out: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
    return convolution, nn.BatchNorm2d(channels_out), nn.ReLU()
