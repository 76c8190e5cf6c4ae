"""One contest over the whole batch, as in CLIP: the upper half of a digit is to find its lower half among all of them.

The batch of 256 pairs runs in micro-batches of 32, and the loss still sees 256 x 256 pairs.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from anybatch import Coupled, Update, clip_loss

torch.manual_seed(0)
images = torch.tensor(load_digits().images, dtype=torch.float32) / 16
halves = images[:, :4].flatten(1), images[:, 4:].flatten(1)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.upper = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.lower = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def encode(model: TwoTowers, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return model.upper(pair[0]), model.lower(pair[1])


if __name__ == "__main__":
    model = TwoTowers()
    loss = clip_loss()  # its temperature is learnt: the optimizer holds it too
    optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()], lr=1e-3)
    update = Update(model, optimizer, Coupled(encode, loss), micro_batch=32)
    for epoch in range(1, 6):
        first, *others = torch.randperm(len(images)).split(256)
        result = update((halves[0][first], halves[1][first]))
        for rows in others:
            update((halves[0][rows], halves[1][rows]))
        print(
            f"epoch {epoch}: loss {result.loss:.3f} over {result.units} pairs in {result.micro_batches} micro-batches"
        )
