"""Two losses from one forward, each a mean over its own units: labels (some are missing) and pixels.

Data: scikit-learn's digits, half of them without a label; the model classifies and rebuilds the image.
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
        print(f"epoch {epoch}: loss {result.loss:.3f} of {parts}")
