"""The loop that is taught, and the same with anybatch: how many rows each learns from, and how exact its gradients are.

Data: scikit-learn's 1,797 handwritten digits, 64 pixels each.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from anybatch import Update, supervised

inputs, targets = (torch.tensor(values) for values in load_digits(return_X_y=True))
inputs = inputs.float() / 16
data = TensorDataset(inputs, targets.long())
criterion = nn.CrossEntropyLoss()


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def before() -> int:
    """Micro-batches of 16, a step after every fourth."""
    model, optimizer = made()
    learnt = waiting = 0
    for index, (rows, labels) in enumerate(DataLoader(data, batch_size=16)):
        (criterion(model(rows), labels) / 4).backward()
        waiting += len(rows)
        if (index + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
            learnt, waiting = learnt + waiting, 0
    return learnt


def after() -> tuple[int, float]:
    """Batches of 64, in micro-batches of 16; the error is the largest of all updates."""
    model, optimizer = made()
    update = Update(model, optimizer, supervised(criterion), micro_batch=16)
    learnt, worst = 0, 0.0
    for batch in DataLoader(data, batch_size=64):
        whole = torch.autograd.grad(criterion(model(batch[0]), batch[1]), list(model.parameters()))
        learnt += int(update(batch).units)
        worst = max(worst, distance([parameter.grad for parameter in model.parameters()], whole))
    return learnt, worst


def distance(one: list[Tensor | None], other: tuple[Tensor, ...]) -> float:
    gaps = [(a - b).norm() for a, b in zip(one, other, strict=True) if a is not None]
    return float(torch.stack(gaps).norm() / torch.stack([b.norm() for b in other]).norm())


if __name__ == "__main__":
    print(f"before: learnt from {before()} of {len(data)} rows")
    learnt, error = after()
    print(f"after:  learnt from {learnt} of {len(data)} rows, gradients at most {error:.0e} off the whole batch's")
