"""Losses of sentence-transformers as they are. These have the shape of the package's own; it need not be installed."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Accumulator, BatchError, LossError, sentence_transformers
from tests.reference import gradient


class Bag(nn.Module):
    """A SentenceTransformer to the loss: features in, features with an embedding out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.dropout, self.head = nn.Embedding(50, 16), nn.Dropout(0.2), nn.Linear(16, 8)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        tokens = self.embed(features["input_ids"])
        return {**features, "sentence_embedding": self.head(self.dropout(tokens.mean(1))), "token_embeddings": tokens}


class MultipleNegativesRankingLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sentence_features: Any, labels: Tensor | None) -> Tensor:
        anchors, *others = (F.normalize(self.model(column)["sentence_embedding"]) for column in sentence_features)
        scores = 20 * anchors @ torch.cat(others).T
        return F.cross_entropy(scores, torch.arange(len(scores)))


class CachedMultipleNegativesRankingLoss(MultipleNegativesRankingLoss):
    pass


class BatchContrastLoss(nn.Module):
    """Keeps its model under another name, has parameters of its own, and looks at labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.sentence_embedder, self.margin = model, nn.Parameter(torch.tensor(0.5))

    def forward(self, sentence_features: Any, labels: Tensor) -> Tensor:
        (embedding,) = (self.sentence_embedder(column)["sentence_embedding"] for column in sentence_features)
        is_same = labels[:, None] == labels
        distances = (embedding[:, None] - embedding).square().sum(-1)
        return torch.where(is_same, distances, (self.margin - distances).relu()).mean()


def batch(columns: int, rows: int = 24) -> tuple[list[dict[str, Tensor]], Tensor]:
    torch.manual_seed(0)
    features = [{"input_ids": torch.randint(0, 50, (rows, 7))} for _ in range(columns)]
    return features, torch.randint(0, 3, (rows,))


@pytest.mark.parametrize(("kind", "columns"), [(MultipleNegativesRankingLoss, 3), (BatchContrastLoss, 1)])
def test_a_loss_given_as_it_is_sees_the_whole_batch(kind, columns):
    torch.manual_seed(0)
    model = Bag().double().eval()
    loss = kind(model).double()
    features, labels = batch(columns)
    reference = copy.deepcopy(loss)
    reference(features, labels).backward()
    Accumulator(model, sentence_transformers(loss), micro_batch=8).backward((features, labels))
    wanted, got = gradient(reference.parameters()), gradient(loss.parameters())
    assert float((got - wanted).norm() / wanted.norm()) <= 1e-14
    assert "forward" not in vars(model), "the model is itself again"
    plain = copy.deepcopy(loss)
    plain.zero_grad()
    for start in (0, 8, 16):
        part = [{"input_ids": column["input_ids"][start : start + 8]} for column in features]
        (plain(part, labels[start : start + 8]) / 3).backward()
    assert float((gradient(plain.parameters()) - wanted).norm() / wanted.norm()) > 0.05


def test_dropout_is_replayed_and_features_may_come_without_labels():
    torch.manual_seed(0)
    model = Bag().double()
    features, _ = batch(2)
    twin = copy.deepcopy(model)
    torch.manual_seed(3)
    encoded = []
    for start in (0, 8, 16):
        parts = [{"input_ids": column["input_ids"][start : start + 8]} for column in features]
        encoded.append(torch.stack([twin(part)["sentence_embedding"] for part in parts]))
    anchors, others = (F.normalize(column) for column in torch.cat(encoded, 1))
    F.cross_entropy(20 * anchors @ others.T, torch.arange(24)).backward()
    torch.manual_seed(3)
    objective = sentence_transformers(MultipleNegativesRankingLoss(model))
    Accumulator(model, objective, micro_batch=8).backward(features)
    wanted = gradient(twin.parameters())
    assert float((gradient(model.parameters()) - wanted).norm() / wanted.norm()) <= 1e-14


def test_what_cannot_serve_is_refused_with_the_fix():
    with pytest.raises(LossError, match=r"sentence_transformers\(CrossEntropyLoss\): the loss has no .model"):
        sentence_transformers(nn.CrossEntropyLoss())
    with pytest.raises(LossError, match=r"cuts the batch a second time. Give MultipleNegativesRankingLoss\(model\)"):
        sentence_transformers(CachedMultipleNegativesRankingLoss(Bag()))
    objective = sentence_transformers(MultipleNegativesRankingLoss(Bag()))
    with pytest.raises(BatchError, match=r"list of feature dicts, got dict.*Tokenize each column"):
        objective.encode(Bag(), {"input_ids": torch.zeros(2, 3)})
