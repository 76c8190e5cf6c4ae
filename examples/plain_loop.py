"""A plain training loop before and after anybatch: 1,797 handwritten digits, batches of 64 in micro-batches of 16.

The usual loop steps after every fourth micro-batch. Its last 5 rows come after the last step and are never learned from.
With anybatch the loader yields batches of 64, and the last batch is simply shorter.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from anybatch import Update, supervised

inputs, targets = (torch.tensor(column) for column in load_digits(return_X_y=True))
data = TensorDataset(inputs.float() / 16, targets)
criterion = nn.CrossEntropyLoss()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def train_usual(model: nn.Module) -> int:
    """Train for an epoch; return the number of rows that were learned from."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learned = waiting = 0
    for number, (rows, labels) in enumerate(DataLoader(data, batch_size=16), 1):
        (criterion(model(rows), labels) / 4).backward()
        waiting += len(rows)
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
            learned, waiting = learned + waiting, 0
    return learned


def train_anybatch(model: nn.Module) -> tuple[int, float]:
    """Train for an epoch; return the rows learned from, and the largest error of a gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = Update(model, optimizer, supervised(criterion), micro_batch=16)
    learned, worst = 0, 0.0
    for batch in DataLoader(data, batch_size=64):
        whole_batch = torch.autograd.grad(criterion(model(batch[0]), batch[1]), list(model.parameters()))
        learned += int(update(batch).units)
        gradient = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        worst = max(worst, relative_error(gradient, whole_batch))
    return learned, worst


def relative_error(gradient: list[Tensor], reference: tuple[Tensor, ...]) -> float:
    one, other = (torch.cat([part.flatten() for part in parts]) for parts in (gradient, reference))
    return ((one - other).norm() / other.norm()).item()


if __name__ == "__main__":
    print(f"usual loop  learned from {train_usual(make_model())} of {len(data)} rows")
    learned, error = train_anybatch(make_model())
    print(f"anybatch    learned from {learned} of {len(data)} rows  gradients off by {error:.0e} at most")
