"""A task for the command line: `anybatch train examples/own_task.py` trains it, with checkpoints and a report.

The other commands take the same file: `anybatch verify` checks its gradient, `plan` predicts its memory, `trace` shows one
update, `compare` compares micro-batch sizes.
"""

import torch
from sklearn.datasets import load_wine
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

from anybatch import Mean, Task, supervised


def accuracy(outputs: Tensor, targets: Tensor) -> dict[str, Mean]:
    return {"accuracy": Mean((outputs.argmax(dim=1) == targets).float().mean())}


def task() -> Task:
    """Classify three kinds of wine by 13 measurements; rare kinds weigh more."""
    inputs, targets = (torch.tensor(values) for values in load_wine(return_X_y=True))
    data = TensorDataset(((inputs - inputs.mean(0)) / inputs.std(0)).float(), targets.long())
    training, validation = random_split(data, [140, 38])
    model = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 3))
    weight = len(targets) / (3 * targets.bincount().float())
    return Task(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        objective=supervised(nn.CrossEntropyLoss(weight=weight), metrics=accuracy),
        training=training,
        validation=validation,
        metric="accuracy",
        batch_size=32,
        micro_batch=8,
        epochs=5,
    )
