"""GAN: two networks, two optimizers, batches of 100 images in micro-batches of 16.

The usual loop accumulates both losses and then steps both optimizers. Two things go wrong. The generator's loss runs through
the discriminator, so its backward adds to the discriminator's gradient too. And the last micro-batch has 4 rows, but counts
as much as one of 16. anybatch has one `Update` per network. Each batch carries its noise, so every split sees the same noise.
"""

from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from anybatch import Objective, Update

Batch = tuple[Tensor, Tensor]
images = torch.tensor(load_digits().data).float() / 16


class GAN:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
        self.discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
        self.generator_optimizer = torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        self.discriminator_optimizer = torch.optim.Adam(self.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))

    def judge(self, images: Tensor, is_real: bool) -> Tensor:
        scores = self.discriminator(images)
        return binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(is_real)))

    def discriminator_loss(self, real: Tensor, noise: Tensor) -> Tensor:
        return self.judge(real, True) + self.judge(self.generator(noise).detach(), False)

    def generator_loss(self, noise: Tensor) -> Tensor:
        return self.judge(self.generator(noise), True)


def train_whole_batch(gan: GAN, batches: list[Batch]) -> None:
    for real, noise in batches:
        gan.discriminator_optimizer.zero_grad()
        gan.discriminator_loss(real, noise).backward()
        gan.discriminator_optimizer.step()
        gan.generator_optimizer.zero_grad()
        gan.generator_loss(noise).backward()
        gan.generator_optimizer.step()


def train_usual(gan: GAN, batches: list[Batch]) -> None:
    for real, noise in batches:
        gan.discriminator_optimizer.zero_grad()
        gan.generator_optimizer.zero_grad()
        parts = list(zip(real.split(16), noise.split(16), strict=True))
        for part_real, part_noise in parts:
            (gan.discriminator_loss(part_real, part_noise) / len(parts)).backward()
            (gan.generator_loss(part_noise) / len(parts)).backward()  # adds to the discriminator's .grad as well
        gan.discriminator_optimizer.step()
        gan.generator_optimizer.step()


def train_anybatch(gan: GAN, batches: list[Batch]) -> None:
    discriminate = Objective(lambda _, batch: gan.discriminator_loss(*batch))
    generate = Objective(lambda _, noise: gan.generator_loss(noise))
    update_discriminator = Update(gan.discriminator, gan.discriminator_optimizer, discriminate, micro_batch=16)
    update_generator = Update(gan.generator, gan.generator_optimizer, generate, micro_batch=16)
    for real, noise in batches:
        update_discriminator((real, noise))
        gan.discriminator.requires_grad_(False)  # the generator learns from it, and must not teach it
        update_generator(noise)
        gan.discriminator.requires_grad_(True)


def gradients(train: Callable[[GAN, list[Batch]], None], batch: Batch) -> list[Tensor]:
    """Return the gradients that the optimizers step with: the discriminator's, then the generator's."""
    gan, seen = GAN(), []

    def record(optimizer: torch.optim.Optimizer, *_: object) -> None:
        seen.append(torch.cat([parameter.grad.flatten() for parameter in optimizer.param_groups[0]["params"]]))

    gan.discriminator_optimizer.register_step_pre_hook(record)
    gan.generator_optimizer.register_step_pre_hook(record)
    train(gan, [batch])
    return seen


if __name__ == "__main__":
    noise = torch.randn(len(images), 16, generator=torch.Generator().manual_seed(1))
    batches = list(zip(images.split(100), noise.split(100), strict=True))
    reference = gradients(train_whole_batch, batches[0])
    for name, train in {"usual loop": train_usual, "anybatch": train_anybatch}.items():
        pairs = zip(gradients(train, batches[0]), reference, strict=True)
        errors = [(gradient - exact).norm() / exact.norm() for gradient, exact in pairs]
        print(f"{name:10}  gradients off by {errors[0]:.0e} (discriminator), {errors[1]:.0e} (generator)")
