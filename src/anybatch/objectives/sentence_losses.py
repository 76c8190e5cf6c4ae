"""Losses of sentence-transformers, used unchanged; the package itself is not imported here."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from anybatch.core import Batch, Coupled
from anybatch.errors import BatchError, LossError


def sentence_transformers(loss: nn.Module) -> Coupled:
    """Make the objective of a sentence-transformers loss over the whole batch.

    Batches are `(sentence_features, labels)`, or `sentence_features` alone: a list of feature dicts, one per column, as the
    loss's own `forward` takes them. While the loss runs, its model returns the sentence embeddings that were computed
    micro-batch by micro-batch. Losses that read token embeddings or call a second model are not supported.

    Args:
        loss: The plain loss, such as `MultipleNegativesRankingLoss(model)`, not its `Cached...` variant.

    Returns:
        An objective; its `parameters()` are those of the loss, the model's included.

    Raises:
        LossError: If the loss has no model, or is a `Cached...` loss, which splits the batch itself.
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
        features, labels = batch if isinstance(batch, tuple) and len(batch) == 2 else (batch, None)
        if not isinstance(features, (list, tuple)) or not all(isinstance(column, Mapping) for column in features):
            raise BatchError(
                f"sentence_transformers() takes (sentence_features, labels) with a list of feature dicts, got "
                f"{type(batch).__name__}. Tokenize each column: ([model.tokenize(anchors), model.tokenize(positives)], labels)."
            )
        outputs = [model(dict(column))["sentence_embedding"] for column in features]
        return {"columns": [{"sentence_embedding": output} for output in outputs], "labels": labels}

    return Coupled(encode, _OnEmbeddings(loss))


def _model_of(loss: nn.Module) -> Any:
    models = (getattr(loss, name, None) for name in ("model", "sentence_embedder"))
    return next((model for model in models if isinstance(model, nn.Module)), None)


class _OnEmbeddings(nn.Module):
    """A loss whose model returns its inputs, because these are embeddings already."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, representations: Batch) -> Tensor:
        own = _model_of(self.loss).__dict__
        before = {"forward": own["forward"]} if "forward" in own else {}
        own["forward"] = lambda features, **_: features
        try:
            columns = [dict(column) for column in representations["columns"]]
            return self.loss(columns, representations["labels"])  # type: ignore[no-any-return]
        finally:
            del own["forward"]
            own.update(before)
