"""CLIP: the upper half of a digit has to find its lower half among 256, in micro-batches of 32 pairs.

A contrastive loss compares every pair with every other pair of the batch. The usual loop compares only the 32 pairs of a
micro-batch, which is another loss. `Coupled` computes all 256 embeddings first, then the loss over 256 x 256 pairs, and then
runs the micro-batches again for their gradients (GradCache). Memory is that of 32 pairs; the price is a second forward.
"""

from collections.abc import Callable
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from anybatch import Coupled, Update, clip_loss

Pairs = tuple[Tensor, Tensor]
images = torch.tensor(load_digits().images).float() / 16
images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
upper, lower = images[:, :4].flatten(1), images[:, 4:].flatten(1)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.upper = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.lower = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def make_model() -> TwoTowers:
    torch.manual_seed(0)
    return TwoTowers()


def encode(model: TwoTowers, pairs: Pairs) -> Pairs:
    return model.upper(pairs[0]), model.lower(pairs[1])


def train_usual(model: TwoTowers, batches: list[Pairs], micro_batch: int = 32) -> None:
    loss = clip_loss()
    optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()], lr=3e-3)  # the temperature is learned
    for batch in batches:
        optimizer.zero_grad()
        parts = list(zip(batch[0].split(micro_batch), batch[1].split(micro_batch), strict=True))
        for part in parts:
            (loss(encode(model, part)) / len(parts)).backward()
        optimizer.step()


def train_anybatch(model: TwoTowers, batches: list[Pairs]) -> None:
    loss = clip_loss()
    optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()], lr=3e-3)
    update = Update(model, optimizer, Coupled(encode, loss), micro_batch=32)
    for batch in batches:
        update(batch)


def gradient(train: Callable[[TwoTowers, list[Pairs]], None], batch: Pairs) -> Tensor:
    model = make_model()
    train(model, [batch])
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@torch.no_grad()
def retrieval(model: TwoTowers) -> float:
    """Return how many of 256 new upper halves have their own lower half as nearest neighbour."""
    queries, keys = (nn.functional.normalize(side, dim=1) for side in encode(model, (upper[-256:], lower[-256:])))
    return ((queries @ keys.T).argmax(1) == torch.arange(256)).float().mean().item()


if __name__ == "__main__":
    batches = list(zip(upper[:1536].split(256), lower[:1536].split(256), strict=True))
    whole_batch = partial(train_usual, micro_batch=256)
    reference = gradient(whole_batch, batches[0])
    for name, train in {"whole batch": whole_batch, "usual loop": train_usual, "anybatch": train_anybatch}.items():
        error = (gradient(train, batches[0]) - reference).norm() / reference.norm()
        model = make_model()
        train(model, batches * 10)
        print(f"{name:11}  gradient off by {error:.0e}  found among 256 new pairs {retrieval(model):.1%}")
