"""The cached loss of sentence-transformers, which is gradient caching: alone, or with windows of N accumulated on top."""

from collections.abc import Mapping
from typing import Any

import torch
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.table.case import Case
from benchmarks.table.cases.coupled import TEMPERATURE
from benchmarks.table.contenders import Learnt


class Features(nn.Sequential):
    """The encoder as the losses of sentence-transformers call it."""

    def forward(self, features: Mapping[str, Tensor], **_: Any) -> dict[str, Tensor]:
        return {"sentence_embedding": self[0](features["input_ids"])}


def learn(case: Case, model: nn.Module, optimizer: Optimizer) -> Learnt:
    """By 8, its loss cuts the batch of 64 itself; by 16, it is given 16 pairs at a time and a window of 4 is accumulated."""
    is_alone = case.micro_batch == 8
    loss = CachedMultipleNegativesRankingLoss(Features(model), scale=1 / TEMPERATURE, mini_batch_size=8)
    steps = 1 if is_alone else case.micro_batches
    for index, batch in enumerate(case.loader(case.batch // steps)):
        features = [{"input_ids": column, "attention_mask": torch.ones(len(column), 1)} for column in batch]
        (loss(features, None) / steps).backward()
        if (index + 1) % steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    return Learnt(note="cached loss alone" if is_alone else "cached loss, 4 of 16 accumulated")
