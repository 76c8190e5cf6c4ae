"""SentenceTransformerTrainer with MultipleNegativesRankingLoss, which is InfoNCE with in-batch negatives."""

import tempfile
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.integrations.huggingface import exact
from benchmarks.sentence_cases import in_order
from benchmarks.table.case import Case
from benchmarks.table.cases.coupled import TEMPERATURE
from benchmarks.table.contenders import Learnt
from benchmarks.table.contenders.hf_trainer import arguments, run


class Looked(nn.Module):
    """The encoder as sentence-transformers calls it: a text is the number of a row, and stands for the vector there."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        super().__init__()
        self.model, self.vectors = model, [torch.stack(column) for column in zip(*case.rows, strict=True)]

    def preprocess(self, texts: list[str], **_: Any) -> dict[str, Tensor]:
        places = [tuple(map(int, text.split())) for text in texts]
        vectors = torch.stack([self.vectors[column][row] for column, row in places])
        return {"input_ids": vectors, "attention_mask": torch.ones(len(texts), 1)}

    tokenize = preprocess

    def forward(self, features: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
        return features | {"sentence_embedding": self.model(features["input_ids"])}

    def save(self, *_: Any, **__: Any) -> None:
        pass


def learn(case: Case, model: nn.Module, optimizer: Optimizer) -> Learnt:
    return train(case, model, optimizer, lambda cls: cls)


def learn_exact(case: Case, model: nn.Module, optimizer: Optimizer) -> Learnt:
    return train(case, model, optimizer, exact)


def train(case: Case, model: nn.Module, optimizer: Optimizer, made: Any) -> Learnt:
    """With the class that `made` makes of theirs."""
    whole = SentenceTransformer(modules=[Looked(case, model)], device="cpu")
    rows = [{"anchor": f"0 {number}", "positive": f"1 {number}"} for number in range(len(case.rows))]
    with tempfile.TemporaryDirectory() as folder:
        trainer = made(SentenceTransformerTrainer)(
            whole,
            arguments(case, folder, SentenceTransformerTrainingArguments, batch_sampler=in_order),
            train_dataset=Dataset.from_list(rows),
            loss=MultipleNegativesRankingLoss(whole, scale=1 / TEMPERATURE),
            optimizers=(optimizer, None),
        )
        return run(case, trainer)
