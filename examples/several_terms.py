"""Two losses from one forward: half of the digits have a label, and all are reconstructed.

The classification loss divides by the number of labels, the reconstruction loss by the number of pixels. A micro-batch has
its own share of each, so no single weight per micro-batch is right. `Terms` weights each loss by its own units.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from anybatch import Terms, Update

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target).where(torch.rand(len(images)) < 0.5, -100)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 48), nn.GELU())
        self.label, self.image = nn.Linear(48, 10), nn.Linear(48, 64)


def losses(model: Model, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    inner = model.inner(batch[0])
    return {
        "label": nn.functional.cross_entropy(model.label(inner), batch[1]),
        "image": nn.functional.mse_loss(model.image(inner), batch[0]),
    }


if __name__ == "__main__":
    model = Model()
    objective = Terms(
        losses,
        units={"label": lambda batch: (batch[1] >= 0).sum(), "image": lambda batch: batch[0].numel()},
        weights={"label": 1.0, "image": 5.0},
    )
    update = Update(model, torch.optim.AdamW(model.parameters(), lr=3e-3), objective, micro_batch=32)
    for epoch in range(1, 4):
        first, *others = torch.randperm(len(images)).split(128)
        result = update((images[first], labels[first]))
        for rows in others:
            update((images[rows], labels[rows]))
        parts = ", ".join(f"{name} {float(result.metrics[name]):.3f}" for name in ("label", "image"))
        print(f"epoch {epoch}: loss {result.loss:.3f} = {parts}")
