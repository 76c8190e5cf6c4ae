"""A task small enough for a test, with everything that a resume must put back: dropout, momentum, running statistics."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from anybatch import Mean, Task, supervised


def small_task(**changes: object) -> Task:
    """75 rows, so that batches of 16 leave a tail of 11."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(105, 6, generator=generator)
    targets = (inputs[:, 0] * inputs[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 2))
    parts: dict[str, object] = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
        "objective": supervised(nn.CrossEntropyLoss(), metrics=accuracy),
        "training": TensorDataset(inputs[:75], targets[:75]),
        "validation": TensorDataset(inputs[75:], targets[75:]),
        "metric": "accuracy",
        "batch_size": 16,
        "micro_batch": 5,
        "batch_norm": "micro",
        "epochs": 3,
        "decay": "cosine",
    }
    return Task(**(parts | changes))  # type: ignore[arg-type]


def accuracy(outputs: Tensor, targets: Tensor) -> dict[str, Mean]:
    return {"accuracy": Mean((outputs.argmax(dim=1) == targets).float().mean())}
