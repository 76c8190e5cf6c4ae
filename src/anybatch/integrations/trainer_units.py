"""What the loss of a Trainer averages over: known of the trainers that come with transformers, TRL and sentence-transformers,
counted on the labels and checked, seen as the loss runs, or refused by name."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core import Batch, Coupled, Number, Objective, SeenLoss, num_rows
from anybatch.errors import LossError, UnitsError
from anybatch.objectives import WatchedLoss, huggingface, label_units, learned, sentence_transformers

REFUSED = {
    "GRPOTrainer": "it makes its batches itself while it trains, from answers that it generates for several windows ahead",
    "RLOOTrainer": "it makes its batches itself while it trains, from answers that it generates for several windows ahead",
    "KTOTrainer": "its loss compares each answer with a mean over the batch at hand, which differs from cut to cut",
}
COUPLED_PREFERENCES = {
    "aot": "sorts the pairs of a batch against each other",
    "aot_unpaired": "sorts the pairs of a batch against each other",
    "sft": "is a mean over tokens, beside means over pairs",
}
"""Losses of DPO that are no mean over pairs."""
PAIRED = ("DPOTrainer", "RewardTrainer")
OF_SENTENCES = ("SentenceTransformerTrainer", "SparseEncoderTrainer")


def is_a(trainer: Any, *names: str) -> bool:
    """True of an instance of a class of one of these names, which need not be imported here."""
    return any(base.__name__ in names for base in type(trainer).__mro__)


def objective_of(trainer: Any, compute: Callable[[nn.Module, Batch], Tensor], units: Any) -> Objective | Coupled:
    """How `trainer` makes its loss, and what that averages over. `compute` is its `compute_loss`."""
    for base in type(trainer).__mro__:
        if base.__name__ in REFUSED:
            raise LossError(
                f"exact({base.__name__}) is not built: {REFUSED[base.__name__]}. Use {base.__name__} as it is."
            )
    if is_a(trainer, *OF_SENTENCES):
        return _of_sentences(trainer)
    if units is not None:
        return Objective(compute, units)
    if is_a(trainer, *PAIRED):
        _check_preferences(trainer)
        return Objective(compute, num_rows)
    if trainer.compute_loss_func is not None:
        return Objective(FunctionLoss(trainer, compute), lambda batch: 1)  # type: ignore[arg-type]
    return _of_owner(trainer, compute)


def _of_owner(trainer: Any, compute: Callable[[nn.Module, Batch], Tensor]) -> Objective:
    """By whose `compute_loss` it is: TRL's, transformers' own, or one that is not known and has to be watched."""
    owner = next(base for base in type(trainer).__mro__ if "compute_loss" in vars(base))
    if owner.__module__.startswith("trl."):
        return _of_trl(trainer, owner, compute)
    if not owner.__module__.startswith("transformers."):
        _check_uncoupled(trainer)
        return learned(compute)
    if trainer.label_smoother is not None:
        is_shifted = _is_causal(trainer)
        return Objective(compute, lambda batch: label_units(batch, is_shifted=is_shifted))
    is_known = is_from_transformers(trainer.model) and not {"labels", "start_positions"}.isdisjoint(trainer.label_names)
    return huggingface(loss=compute) if is_known else learned(compute)


def _check_uncoupled(trainer: Any) -> None:
    """Refuse a cross-encoder's contest: its scores are of pairs of rows, and no row has a representation to be kept."""
    name = type(getattr(trainer, "loss", None)).__name__
    if is_a(trainer, "CrossEncoderTrainer") and "NegativesRanking" in name:
        raise LossError(
            f"exact(CrossEncoderTrainer) with {name} is not built: it scores each query with answers of other rows of its "
            "batch, so that every pair of rows is a forward of its own. Use a loss over rows, such as BinaryCrossEntropyLoss."
        )


def is_from_transformers(model: Any) -> bool:
    """True of models of transformers, with adapters or without: their heads average over labels."""
    return any(base.__name__ == "PreTrainedModel" for base in type(_base_of(model)).__mro__)


class FunctionLoss:
    """The loss of a Trainer with `compute_loss_func(outputs, labels, num_items_in_batch)`.

    The function is given the labels of the micro-batch for `num_items_in_batch`. One that divides by that number is a mean
    over it; of one that does not, what its means divide by is seen. Which it is, is tried once, with twice the number.
    """

    def __init__(self, trainer: Any, compute: Callable[[nn.Module, Batch], Tensor]) -> None:
        self._trainer = trainer
        self._compute = compute
        self._function = trainer.compute_loss_func
        self._is_divided: bool | None = None
        self._watched = WatchedLoss(self._with_count)

    def __call__(self, model: nn.Module, batch: Batch) -> SeenLoss:
        if self._is_divided is None:
            with torch.no_grad():
                once, twice = (self._with_count(model, batch, factor) for factor in (1, 2))
            self._is_divided = bool(torch.isclose(twice, once / 2, rtol=1e-4, atol=0.0))
            if not self._is_divided and not torch.isclose(twice, once, rtol=1e-4, atol=0.0):
                raise UnitsError(
                    f"compute_loss_func gave {once.item():.6g} for num_items_in_batch={self._count(batch)} and "
                    f"{twice.item():.6g} for twice that: it neither divides by it nor leaves it alone. Give units=, a function "
                    "of the batch that returns what the loss divides by."
                )
        if not self._is_divided:
            return self._watched(model, batch)
        return SeenLoss(loss=self._with_count(model, batch), units=float(self._count(batch)), metrics={})

    def _count(self, batch: Batch) -> Number:
        return label_units(batch, is_shifted=getattr(self._trainer, "_loss_shifts_labels", False))

    def _with_count(self, model: nn.Module, batch: Batch, factor: int = 1) -> Tensor:
        count = max(int(self._count(batch)), 1) * factor
        self._trainer.compute_loss_func = lambda outputs, labels, **_: self._function(
            outputs, labels, num_items_in_batch=count
        )
        try:
            return self._compute(model, batch)
        finally:
            self._trainer.compute_loss_func = self._function


def _of_trl(trainer: Any, owner: type, compute: Callable[[nn.Module, Batch], Tensor]) -> Objective:
    if owner.__name__ != "SFTTrainer":
        raise UnitsError(
            f"what the loss of {owner.__name__} averages over is not known. Give exact({owner.__name__}, units=...), a "
            "function of the batch, if it is a mean over something that can be counted on the batch: units=anybatch.rows for "
            "rows."
        )
    if trainer.aux_loss_enabled:
        raise UnitsError(
            "this SFTTrainer adds the load-balancing loss of a mixture of experts, which is no mean over tokens. Set "
            "router_aux_loss_coef=0.0 in its SFTConfig, or balance without it."
        )
    return Objective(compute, lambda batch: label_units(batch, is_shifted=True))


def _check_preferences(trainer: Any) -> None:
    for name in getattr(trainer, "loss_types", ()):
        if name in COUPLED_PREFERENCES:
            raise LossError(
                f"exact(DPOTrainer) with loss_type {name!r} is not built: it {COUPLED_PREFERENCES[name]}. Leave it out of "
                "loss_type, or train with the plain DPOTrainer."
            )
    if getattr(trainer, "aux_loss_enabled", False):
        raise LossError(
            f"this {type(trainer).__name__} adds the load-balancing loss of a mixture of experts, which is no mean over pairs. "
            "Set router_aux_loss_coef=0.0 in the model's configuration."
        )


def _base_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _is_causal(trainer: Any) -> bool:
    """True where the label smoother shifts labels: of causal language models, as transformers lists them."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return type(_base_of(trainer.model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _of_sentences(trainer: Any) -> Coupled:
    loss = trainer.loss
    if isinstance(loss, Mapping):
        raise LossError(
            f"this {type(trainer).__name__} has a loss for each of {len(loss)} datasets, and a window mixes them: no one "
            "contest is over all of it. Train with one loss, or on one dataset after the other."
        )
    if getattr(loss, "gather_across_devices", False):
        raise LossError(
            f"{type(loss).__name__}(gather_across_devices=True) gathers the rows of all ranks, and so does exact(): each row "
            "would be there twice. Make the loss with gather_across_devices=False."
        )
    whole = sentence_transformers(loss)

    def encode(model: nn.Module, batch: Batch) -> Batch:
        return whole.encode(model, trainer.collect_features(batch))

    return Coupled(encode, whole.loss, units=lambda batch: 1)  # reported only; rows need not be dim 0 of features
