"""A two-tower contrastive model that matches docstrings and bodies of the standard library's functions.

Every row is compared with all other rows of its batch (`Coupled`): representations first, then the loss on all of them, then
a second forward and the backward of each micro-batch.
"""

import re
import zlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from anybatch.app.training.tasks.stdlib import functions, is_held_out
from anybatch.app.training.tasks.task import Task
from anybatch.core import Coupled, Mean

BUCKETS = 8192  # embeddings, shared by words of equal hash; 0 is the padding
LONGEST = 64
WIDTH = 64
_WORD = re.compile(r"[A-Za-z]+|\d+")


def task() -> Task:
    described = [function for function in functions() if function.docstring and function.body]
    docstrings = torch.stack([_words(function.docstring) for function in described])
    bodies = torch.stack([_words(function.body) for function in described])
    is_kept = torch.tensor([is_held_out(number) for number in range(len(described))])
    model = TwoTowers()
    return Task(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        objective=Coupled(encode, contrast),
        training=TensorDataset(docstrings[~is_kept], bodies[~is_kept]),
        validation=TensorDataset(docstrings[is_kept], bodies[is_kept]),
        metric="found",
        batch_size=64,
        micro_batch=16,
        epochs=8,
        warmup=10,
        decay="cosine",
        validation_batch=128,
    )


class TwoTowers(nn.Module):
    """A tower for docstrings and one for bodies; each averages its words and applies one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.docstring = Tower()
        self.body = Tower()
        self.scale = nn.Parameter(torch.tensor([10.0]).log())  # FSDP2 takes no parameter without a dimension

    def forward(self, docstrings: Tensor, bodies: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return unit vectors of docstrings and bodies, and the inverse temperature."""
        return self.docstring(docstrings), self.body(bodies), self.scale.exp().squeeze(0)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(BUCKETS, WIDTH, mode="mean", padding_idx=0)
        self.head = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, words: Tensor) -> Tensor:
        return F.normalize(self.head(self.words(words)), dim=-1)


def encode(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    encoded: tuple[Tensor, Tensor, Tensor] = model(*batch)
    return encoded


def contrast(encoded: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, dict[str, Mean]]:
    """Symmetric InfoNCE: match each docstring with its body, and each body with its docstring."""
    docstrings, bodies, scale = encoded
    similarities = docstrings @ bodies.T * scale
    right = torch.arange(len(similarities), device=similarities.device)
    loss = (F.cross_entropy(similarities, right) + F.cross_entropy(similarities.T, right)) / 2
    return loss, {"found": Mean((similarities.argmax(dim=1) == right).float().mean())}


def _words(text: str) -> Tensor:
    hashes = [1 + zlib.crc32(word.lower().encode()) % (BUCKETS - 1) for word in _WORD.findall(text)[:LONGEST]]
    return torch.tensor(hashes + [0] * (LONGEST - len(hashes)))
