"""The losses of sentence-transformers, given as they are; the package itself is not needed here."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from anybatch.batches import Batch
from anybatch.errors import BatchError, LossError
from anybatch.gradients.coupled import Coupled


def sentence_transformers(loss: nn.Module) -> Coupled:
    """A loss of sentence-transformers, such as `MultipleNegativesRankingLoss(model)`, over the whole batch.

    Batches are `(sentence_features, labels)` or `sentence_features` alone: a list of feature dicts, one per column, as
    the loss's own `forward` takes them. The loss runs as it is: while it computes, its `model` hands out the embeddings that
    were made micro-batch by micro-batch. The plain loss is meant, not its `Cached...` sister, which would cache a second time.
    """
    if not isinstance(getattr(loss, "model", None), nn.Module):
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
        return {"embeddings": [dict(_outputs(model(dict(column)))) for column in features], "labels": labels}

    return Coupled(encode, _Detached(loss))


class _Detached(nn.Module):
    """The loss on embeddings that are there already."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, representations: Batch) -> Tensor:
        embeddings = representations["embeddings"]
        with _model_handing_out(self.loss, embeddings):
            value: Tensor = self.loss([dict(column) for column in embeddings], representations["labels"])
        return value


class _Ready(nn.Module):
    """Stands where the model stands: features that are outputs already pass through."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # not registered as a child: attributes that a loss reads (similarity_fn_name, device) come from the model
        object.__setattr__(self, "_model", model)

    def forward(self, features: Mapping[str, Any], **_: Any) -> Mapping[str, Any]:
        return features

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@contextmanager
def _model_handing_out(loss: nn.Module, embeddings: list[Mapping[str, Tensor]]) -> Iterator[None]:
    model = loss.model
    loss.model = _Ready(model)  # type: ignore[arg-type]
    try:
        yield
    finally:
        loss.model = model


def _features_and_labels(batch: Batch) -> tuple[list[Mapping[str, Any]], Tensor | None]:
    features, labels = batch if isinstance(batch, tuple) and len(batch) == 2 else (batch, None)
    if not isinstance(features, (list, tuple)) or not all(isinstance(column, Mapping) for column in features):
        raise BatchError(
            f"sentence_transformers() takes (sentence_features, labels) with a list of feature dicts, got "
            f"{type(batch).__name__}. Tokenize each column: ([model.tokenize(anchors), model.tokenize(positives)], labels)."
        )
    return list(features), labels


def _outputs(outputs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """What losses look at: the embedding of each sentence. Token embeddings are as long as their micro-batch is."""
    for name in ("sentence_embedding",):
        if isinstance(outputs.get(name), Tensor):
            yield name, outputs[name]
