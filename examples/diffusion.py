"""Diffusion model: a random timestep and random noise for every row, batches of 100 images in micro-batches of 16.

Draw timesteps and noise for the whole batch, before it is split. If the loss draws them, every micro-batch size trains on other
draws, and no run can be compared with another. The usual loop also gives the last micro-batch, which has 4 rows, the weight
of one with 16. anybatch weights each micro-batch by its rows.
"""

from collections.abc import Callable
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from anybatch import Objective, Update

Batch = dict[str, Tensor]
TIMESTEPS = 50
images = torch.tensor(load_digits().data).float() / 8 - 1
images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
signal = torch.cos(torch.linspace(0.0, 1.5, TIMESTEPS)).square()  # share of the image in the noisy image, per timestep


def with_noise(images: Tensor) -> Batch:
    return {"image": images, "timestep": torch.randint(TIMESTEPS, (len(images),)), "noise": torch.randn_like(images)}


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(TIMESTEPS, 64)
        self.body = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64))

    def forward(self, noisy: Tensor, timestep: Tensor) -> Tensor:
        return self.body(noisy + self.time(timestep))


def make_model() -> Denoiser:
    torch.manual_seed(0)
    return Denoiser()


def denoising_loss(model: nn.Module, batch: Batch) -> Tensor:
    share = signal[batch["timestep"], None]
    noisy = share.sqrt() * batch["image"] + (1 - share).sqrt() * batch["noise"]
    return nn.functional.mse_loss(model(noisy, batch["timestep"]), batch["noise"])


def train_usual(model: nn.Module, batches: list[Batch], micro_batch: int = 16) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in batches:
        optimizer.zero_grad()
        parts = list(zip(*(column.split(micro_batch) for column in batch.values()), strict=True))
        for part in parts:
            (denoising_loss(model, dict(zip(batch, part, strict=True))) / len(parts)).backward()
        optimizer.step()


def train_anybatch(model: nn.Module, batches: list[Batch]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    update = Update(model, optimizer, Objective(denoising_loss), micro_batch=16)  # the loss is a mean over rows
    for batch in batches:
        update(batch)


def gradient(train: Callable[[nn.Module, list[Batch]], None], batch: Batch) -> Tensor:
    model = make_model()
    train(model, [batch])
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


if __name__ == "__main__":
    torch.manual_seed(1)
    *batches, new = [with_noise(images[start : start + 100]) for _ in range(10) for start in range(0, 1700, 100)]
    whole_batch = partial(train_usual, micro_batch=100)
    reference = gradient(whole_batch, batches[0])
    for name, train in {"whole batch": whole_batch, "usual loop": train_usual, "anybatch": train_anybatch}.items():
        error = (gradient(train, batches[0]) - reference).norm() / reference.norm()
        model = make_model()
        train(model, batches)
        print(f"{name:11}  gradient off by {error:.0e}  loss on new noise {denoising_loss(model, new):.4f}")
