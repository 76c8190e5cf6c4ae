"""1,000 rows of 10 numbers, two classes: the usual example of gradient accumulation.

A row belongs to class 1 if the sum of its numbers is above 0. The data do not depend on the seed. Batches have 64 rows in
micro-batches of 16; 1,000 is 15 x 64 + 40, so the last batch is short.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from anybatch.app.training.tasks.task import Task
from anybatch.core import Mean, supervised


def task() -> Task:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2000, 10, generator=generator)
    targets = (inputs.sum(dim=1) > 0).long()
    model = nn.Linear(10, 2)
    return Task(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        objective=supervised(nn.CrossEntropyLoss(), metrics=accuracy),
        training=TensorDataset(inputs[:1000], targets[:1000]),
        validation=TensorDataset(inputs[1000:], targets[1000:]),
        metric="accuracy",
        batch_size=64,
        micro_batch=16,
        base_batch=16,
        epochs=10,
    )


def accuracy(outputs: Tensor, targets: Tensor) -> dict[str, Mean]:
    """Share of rows with the largest output at the target."""
    return {"accuracy": Mean((outputs.argmax(dim=1) == targets).float().mean())}
