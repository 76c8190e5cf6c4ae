"""Three problems whose every row's own gradient is known: what noise is, without any estimate of ours."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine
from torch import Tensor, nn

from anybatch import Objective, supervised
from tests.reference import gradient

IGNORED = -100


@dataclass(frozen=True)
class Problem:
    """Weights that stay where they are, and the rows that there are."""

    model: nn.Module
    objective: Objective
    batch: Callable[[Sequence[int]], Any]
    """The batch of these rows."""
    grams: Tensor
    """Products of every two rows' gradients: of the sum of a row's losses, not of their mean."""
    units: Tensor
    """What each row counts."""

    @property
    def num_rows(self) -> int:
        return len(self.units)

    @property
    def noise_scale(self) -> float:
        """rows * E|g - G|^2 / |G|^2 for batches g = sum S / sum U drawn from these rows, to first order in 1 / rows."""
        whole = self.grams.sum() / self.units.sum() ** 2
        along = self.grams.sum(dim=1) / self.units.sum()
        spread = self.grams.diagonal() - 2 * self.units * along + self.units**2 * whole
        return float(spread.mean() / self.units.mean() ** 2 / whole)


def problem_of(
    model: nn.Module,
    objective: Objective,
    batch: Callable[[Sequence[int]], Any],
    units: Tensor,
    *,
    lr: float,
    steps: int,
) -> Problem:
    """Trained a little, because at the first weights there is hardly any noise."""
    model = model.double()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        objective.loss(model, batch(torch.randperm(len(units))[:64].tolist())).backward()
        optimizer.step()
    rows = []
    for row in range(len(units)):
        model.zero_grad()
        (objective.loss(model, batch([row])) * units[row]).backward()
        rows.append(gradient(model.parameters()))
    model.zero_grad()
    every = torch.stack(rows)
    return Problem(model, objective, batch, every @ every.T, units)


@cache
def linear() -> Problem:
    torch.manual_seed(0)
    inputs = torch.randn(400, 6).double()
    targets = inputs @ torch.randn(6, 1).double() + 2 * torch.randn(400, 1).double()
    objective = supervised(nn.MSELoss())
    return problem_of(
        nn.Linear(6, 1),
        objective,
        lambda rows: (inputs[rows], targets[rows]),
        torch.ones(400).double(),
        lr=0.1,
        steps=4,
    )


@cache
def digits() -> Problem:
    torch.manual_seed(1)
    data = load_digits()
    inputs, targets = torch.tensor(data.data[:400]).double() / 16, torch.tensor(data.target[:400])
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    objective = supervised(nn.CrossEntropyLoss())
    return problem_of(
        model, objective, lambda rows: (inputs[rows], targets[rows]), torch.ones(400).double(), lr=1e-2, steps=30
    )


@cache
def text() -> Problem:
    """A causal transformer on sentences about data sets, whose lengths are ragged; units are tokens."""
    torch.manual_seed(2)
    texts = " ".join(load().DESCR for load in (load_digits, load_iris, load_wine, load_breast_cancer, load_diabetes))
    sentences = [one for one in re.split(r"\W*[.:;|]\s+", texts) if len(one) > 6]
    sources = [torch.tensor(list(one.encode()[: len(one) // 2])) % 32 for one in sentences]
    sources = [source[:40] for source in sources]
    units = torch.tensor([float(len(source) - 1) for source in sources]).double()

    def batch(rows: Sequence[int]) -> dict[str, Tensor]:
        chosen = [sources[row] for row in rows]
        ids = nn.utils.rnn.pad_sequence(chosen, batch_first=True)
        labels = nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=IGNORED)
        return {"input_ids": ids, "attention_mask": (labels != IGNORED).long(), "labels": labels}

    return problem_of(Transformer(), TOKENS, batch, units, lr=1e-2, steps=10)


def token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["input_ids"])[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)


def num_tokens(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"][:, 1:] != IGNORED).sum()


TOKENS = Objective(token_loss, num_tokens)


class Transformer(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(32, width), nn.Embedding(40, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, 32)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        return self.head(self.layer(self.embed(ids) + self.place(torch.arange(length)), src_mask=mask))


PROBLEMS = {"linear": linear, "digits": digits, "text": text}
