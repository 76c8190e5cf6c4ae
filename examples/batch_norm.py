"""A small ResNet with BatchNorm: every layer normalises by the statistics of the whole batch, whatever the micro-batch."""

import copy

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from anybatch import Update, supervised

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)  # so that what differs is the mathematics, not rounding
digits = load_digits()
images, labels = torch.tensor(digits.images)[:, None] / 16, torch.tensor(digits.target)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norms[0](self.first(x)).relu()
        return (x + self.norms[1](self.second(inner))).relu()


@torch.no_grad()
def distance(model: nn.Module, whole: nn.Module) -> float:
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    gaps, sizes = zip(*(((a - b).norm(), b.norm()) for a, b in pairs), strict=True)
    return float(torch.stack(gaps).norm() / torch.stack(sizes).norm())


if __name__ == "__main__":
    start = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), Block(8), Block(8), nn.Flatten(), nn.Linear(8 * 36, 10)
    )
    models = {name: copy.deepcopy(start) for name in ("whole", "exact", "micro")}
    for name, model in models.items():
        update = Update(
            model,
            torch.optim.SGD(model.parameters(), lr=0.05),
            supervised(nn.CrossEntropyLoss()),
            micro_batch=64 if name == "whole" else 8,
            batch_norm="micro" if name == "micro" else "exact",
        )
        for number in range(5):
            rows = slice(64 * number, 64 * number + 64)
            update((images[rows], labels[rows]))
    for name in ("exact", "micro"):
        print(f"{name}: weights {distance(models[name], models['whole']):.0e} from those of batches in one piece")
