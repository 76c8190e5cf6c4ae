"""Pairs of sentences for SentenceTransformerTrainer, and the one contest of a whole window."""

import copy
from typing import Any

import torch
import transformers
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from torch.utils.data import BatchSampler, SequentialSampler

from benchmarks.tiny_models import texts
from benchmarks.trainers import Handed, arguments, vector_of


class Encoder(nn.Module):
    """Tokens by number, their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 12), nn.Linear(12, 8)

    def tokenize(self, texts: list[str], **_: Any) -> dict[str, Tensor]:
        numbers = [[int(word) for word in text.split()] for text in texts]
        width = max(map(len, numbers))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in numbers])
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}

    preprocess = tokenize

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        mask = features["attention_mask"][..., None]
        mean = (self.embed(features["input_ids"]) * mask).sum(1) / mask.sum(1)
        return features | {"sentence_embedding": self.head(mean).tanh()}

    def save(self, *_: Any, **__: Any) -> None:
        pass


def encoder() -> SentenceTransformer:
    torch.manual_seed(0)
    return SentenceTransformer(modules=[Encoder()], device="cpu")


def spelled(row: dict[str, Tensor]) -> str:
    return " ".join(map(str, row["input_ids"].tolist()))


ROWS = [{"anchor": spelled(one), "positive": spelled(two)} for one, two in zip(texts(19, 6), texts(19, 7), strict=True)]


def in_order(dataset: Any, batch_size: int, drop_last: bool, **_: Any) -> BatchSampler:
    return BatchSampler(SequentialSampler(dataset), batch_size, drop_last)


def static_encoder() -> SentenceTransformer:
    """One of sentence-transformers' own modules, whose checkpoints it reads again."""
    words = Tokenizer(WordLevel({str(number): number for number in range(50)}, "0"))
    words.pre_tokenizer = Whitespace()
    torch.manual_seed(0)
    return SentenceTransformer(modules=[StaticEmbedding(words, embedding_dim=8)], device="cpu")


def fitted(
    cls: type, make_loss: Any, folder: Any, *, make: Any = encoder, resume: Any = None, **options: Any
) -> tuple[Any, Handed]:
    model, handed = make(), Handed()
    trainer = cls(
        model,
        arguments(str(folder), SentenceTransformerTrainingArguments, batch_sampler=in_order, **options),
        train_dataset=Dataset.from_list(ROWS),
        loss=make_loss(model),
        callbacks=[handed],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, handed


def error_of(handed: Handed) -> float:
    found = []
    for gradient, weights, start in zip(handed.gradients, handed.models, (0, 12), strict=True):
        twin = copy.deepcopy(encoder())
        twin.load_state_dict(weights)
        twin = twin.double()
        rows = ROWS[start : start + 12]
        features = [twin[0].tokenize([row[column] for row in rows]) for column in ("anchor", "positive")]
        losses.MultipleNegativesRankingLoss(twin)(features, None).backward()
        wanted = torch.cat([vector_of(one) for one in twin.parameters()])
        found.append(float((gradient - wanted).norm() / wanted.norm()))
    return max(found)
