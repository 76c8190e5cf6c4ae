"""Rows that look at each other: through BatchNorm, or through a contrastive loss."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Coupled, info_nce, supervised
from benchmarks.table.case import Case, later
from benchmarks.table.cases.rows import cross_entropy

TEMPERATURE = 0.05
Pair = tuple[Tensor, Tensor]


def cases() -> list[Case]:
    pairs = contrastive()
    by_16 = replace(pairs, name="InfoNCE, 64 pairs, by 16", micro_batch=16)
    tail = replace(
        by_16, name="InfoNCE, 232 pairs = 3 x 64 + 40", rows=pairs.rows[:232], is_scheduled=True, kind="pairs"
    )
    return [batch_norm(), pairs, by_16, tail, replace(tail, name="two ranks, InfoNCE, 232 pairs", ranks=2)]


def batch_norm() -> Case:
    torch.manual_seed(8)
    x = torch.randn(256, 10)
    return Case(
        name="BatchNorm, 64 rows, by 8",
        rows=list(zip(x, (x.sum(1) > 0).long(), strict=True)),
        model=later(normed),
        loss=cross_entropy,
        objective=supervised(nn.CrossEntropyLoss()),
        batch=64,
        micro_batch=8,
        are_rows_coupled=True,
        limit=3e-6,
    )


def normed() -> nn.Module:
    layers = [nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(32, 2))


def encode(model: nn.Module, batch: Pair) -> Pair:
    return model(batch[0]), model(batch[1])


def contrastive_loss(model: nn.Module, batch: Pair) -> Tensor:
    """Every query is to find its key among the keys it is given."""
    queries, keys = (F.normalize(column, dim=-1) for column in encode(model, batch))
    return F.cross_entropy(queries @ keys.T / TEMPERATURE, torch.arange(len(queries)))


def contrastive() -> Case:
    torch.manual_seed(9)
    queries = torch.randn(256, 16)
    keys = queries + 0.5 * torch.randn(256, 16)
    return Case(
        name="InfoNCE, 64 pairs, by 8",
        rows=list(zip(queries, keys, strict=True)),
        model=later(lambda: nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))),
        loss=contrastive_loss,
        objective=Coupled(encode, info_nce(TEMPERATURE)),
        batch=64,
        micro_batch=8,
        are_rows_coupled=True,
        limit=3e-6,
    )
