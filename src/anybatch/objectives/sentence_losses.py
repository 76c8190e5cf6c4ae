"""The losses of sentence-transformers, given as they are; the package itself is not needed here."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from anybatch.core import Batch, Coupled
from anybatch.errors import BatchError, LossError


def sentence_transformers(loss: nn.Module) -> Coupled:
    """A loss of sentence-transformers, such as `MultipleNegativesRankingLoss(model)`, over the whole batch.

    Batches are `(sentence_features, labels)` or `sentence_features` alone: a list of feature dicts, one per column, as
    the loss's own `forward` takes them. The loss runs as it is: while it computes, its `model` hands out the sentence
    embeddings that were made micro-batch by micro-batch. Losses that look at tokens, or ask a second model, cannot be helped
    so. The plain loss is meant, not its `Cached...` sister, which would cut the batch a second time. `parameters()` of the
    objective are those of the loss, the model's among them.
    """
    if _model_of(loss) is None:
        raise LossError(
            f"sentence_transformers({type(loss).__name__}): the loss has no .model to stand in for. Give a loss of "
            "sentence-transformers, such as MultipleNegativesRankingLoss(model), or use Coupled(encode, loss)."
        )
    if type(loss).__name__.startswith("Cached"):
        raise LossError(
            f"sentence_transformers({type(loss).__name__}): this loss cuts the batch a second time. Give "
            f"{type(loss).__name__.removeprefix('Cached')}(model); its gradient is the same, exactly."
        )

    def encode(model: nn.Module, batch: Batch) -> Batch:
        features, labels = _features_and_labels(batch)
        outputs = [model(dict(column))["sentence_embedding"] for column in features]
        return {"columns": [{"sentence_embedding": output} for output in outputs], "labels": labels}

    return Coupled(encode, _OnEmbeddings(loss))


def _model_of(loss: nn.Module) -> nn.Module | None:
    models = (getattr(loss, name, None) for name in ("model", "sentence_embedder"))
    return next((model for model in models if isinstance(model, nn.Module)), None)


class _OnEmbeddings(nn.Module):
    """The loss on embeddings that are there already."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, representations: Batch) -> Tensor:
        model = _model_of(self.loss)
        assert model is not None
        with _handing_out(model):
            columns = [dict(column) for column in representations["columns"]]
            return self.loss(columns, representations["labels"])  # type: ignore[no-any-return]


@contextmanager
def _handing_out(model: nn.Module) -> Iterator[None]:
    """Let the model return what it is given: features that are outputs already."""
    before = model.__dict__.get("forward")
    model.__dict__["forward"] = lambda features, **_: features
    try:
        yield
    finally:
        if before is None:
            del model.__dict__["forward"]
        else:
            model.__dict__["forward"] = before


def _features_and_labels(batch: Batch) -> tuple[list[Mapping[str, Any]], Tensor | None]:
    features, labels = batch if isinstance(batch, tuple) and len(batch) == 2 else (batch, None)
    if not isinstance(features, (list, tuple)) or not all(isinstance(column, Mapping) for column in features):
        raise BatchError(
            f"sentence_transformers() takes (sentence_features, labels) with a list of feature dicts, got "
            f"{type(batch).__name__}. Tokenize each column: ([model.tokenize(anchors), model.tokenize(positives)], labels)."
        )
    return list(features), labels
