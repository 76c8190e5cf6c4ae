"""Image classifier with BatchNorm: a small ResNet on handwritten digits, batches of 64 in micro-batches of 8.

BatchNorm normalizes by the rows it is given. In the usual accumulation loop it is given 8 rows at a time, so the gradient is
not the one of a batch of 64. `batch_norm="exact"` normalizes by all 64 rows, and still holds 8 at a time in memory.
"""

from collections.abc import Callable
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from anybatch import Update, supervised

Batches = list[tuple[Tensor, Tensor]]
images, labels = (torch.tensor(column) for column in load_digits(return_X_y=True))
images = images.float().view(-1, 1, 8, 8) / 16
criterion = nn.CrossEntropyLoss()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.body(x)).relu()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    stem = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
    return nn.Sequential(*stem, Block(8), Block(8), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8 * 16, 10))


def train_usual(model: nn.Module, batches: Batches, micro_batch: int = 8) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in batches:
        optimizer.zero_grad()
        parts = list(zip(inputs.split(micro_batch), targets.split(micro_batch), strict=True))
        for part_inputs, part_targets in parts:
            (criterion(model(part_inputs), part_targets) / len(parts)).backward()
        optimizer.step()


def train_anybatch(model: nn.Module, batches: Batches) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = Update(model, optimizer, supervised(criterion), micro_batch=8, batch_norm="exact")
    for batch in batches:
        update(batch)


def gradient(train: Callable[[nn.Module, Batches], None], batch: tuple[Tensor, Tensor]) -> Tensor:
    model = make_model()
    train(model, [batch])
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    model.eval()  # uses the running statistics, which depend on the micro-batches too
    return (model(images[960:]).argmax(1) == labels[960:]).float().mean().item()


if __name__ == "__main__":
    batches = list(zip(images[:960].split(64), labels[:960].split(64), strict=True))
    whole_batch = partial(train_usual, micro_batch=64)
    reference = gradient(whole_batch, batches[0])
    for name, train in {"whole batch": whole_batch, "usual loop": train_usual, "anybatch": train_anybatch}.items():
        error = (gradient(train, batches[0]) - reference).norm() / reference.norm()
        model = make_model()
        train(model, batches)
        print(f"{name:11}  gradient off by {error:.0e}  accuracy on new digits {accuracy(model):.1%}")
