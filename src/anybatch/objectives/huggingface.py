"""`huggingface()`: the objective of models that compute their own loss from `labels`.

Units are the labels that the loss was seen to average. A signature is not trusted: 14 of 18 model classes tried accept
`num_items_in_batch` and ignore it.
"""

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from anybatch.core import (
    Batch,
    FakeTensor,
    Number,
    Objective,
    Reduction,
    Units,
    inside_compiled,
    is_low,
    leaves_of,
    nodes_named,
)
from anybatch.errors import BatchError, LossError, UnitsError
from anybatch.objectives.observed import ObservedMeans
from anybatch.parallel import unwrapped

ModelLoss = Callable[[nn.Module, Batch], Tensor]
_PREDICTS_NEXT_TOKEN = re.compile(r"CausalLM|LMHead|ForConditionalGeneration")


def huggingface(*, loss: ModelLoss | None = None, units: Units | None = None) -> Objective:
    """Make the objective `model(**batch).loss`, averaged over the labels that are not ignored.

    The model's class says what its loss averages over: causal language models shift the labels by one, masked,
    sequence-to-sequence and classification heads do not, and CTC heads average or sum over rows, as their configuration says.
    Batches of preferences (`chosen_input_ids` and `rejected_input_ids`, as in DPO) are averaged over pairs. The count is
    checked once per model against what the loss divided by.

    Args:
        loss: Function of (model, batch) that computes the loss instead, such as `trainer.compute_loss`.
        units: Function of the batch that returns what the loss divides by, for a head that divides by something else.

    Returns:
        An objective for `Update` and `Accumulator`.

    Raises:
        BatchError: In an update, if a batch is no mapping.
        LossError: In an update, if the model returns no loss or a contrastive one.
        UnitsError: In an update, if the loss divides by something else than was counted, or adds something to its mean.

    >>> import torch
    >>> labels = torch.tensor([[5, 6, 7], [8, 9, -100]])
    >>> int(huggingface().units({"labels": labels}))  # nothing predicts the first label of a row
    3
    """
    checked: WeakSet[nn.Module] = WeakSet()

    def compute(model: nn.Module, batch: Batch) -> Tensor:
        _check_uncoupled(batch)
        return _loss_of(model, batch) if loss is None else loss(model, batch)

    def checked_once(model: nn.Module, batch: Batch) -> Tensor:
        is_known = units is not None or model in checked or _are_pairs(batch)
        has_numbers = not isinstance(next(model.parameters(), None), FakeTensor)
        if is_known or inside_compiled(model) is not None or not has_numbers:
            return compute(model, batch)
        with ObservedMeans() as observed:
            value = compute(model, batch)
        _check_means(model, batch, value, observed)
        if value.requires_grad:
            checked.add(model)
        return value

    def units_for(model: nn.Module) -> Units:
        if _is_ctc(model):  # a mean over rows: each row's loss is divided by the length of its own target before
            return lambda batch: len(_mapping(batch)["labels"])
        return partial(label_units, is_shifted=_predicts_next_token(_base_model(model)))

    if units is not None:
        return Objective(checked_once, units, reduction_for=_reduction_of)
    return Objective(checked_once, label_units, units_for=units_for, reduction_for=_reduction_of)


def label_units(batch: Batch, *, is_shifted: bool = True) -> Number:
    """Count labels that are not ignored; `is_shifted` leaves out the first of a row, which no token predicts."""
    batch = _mapping(batch)
    _check_uncoupled(batch)
    if _are_pairs(batch):
        return len(batch["chosen_input_ids"])
    if isinstance(batch.get("start_positions"), Tensor):
        return _answer_units(batch)
    has_shifted = isinstance(batch.get("shift_labels"), Tensor)
    labels = batch.get("shift_labels" if has_shifted else "labels")
    if not isinstance(labels, Tensor):
        raise UnitsError(
            f"the batch has no tensor 'labels' (keys: {', '.join(map(str, batch))}), so there is no loss to count the units "
            "of. Add 'labels', or give huggingface(units=...), a function of the batch."
        )
    if labels.is_floating_point():
        return labels.numel()
    return ((labels[..., 1:] if is_shifted and not has_shifted else labels) != -100).count_nonzero()


def _mapping(batch: Batch) -> Mapping[str, Any]:
    if isinstance(batch, Mapping):
        return batch
    raise BatchError(
        f"huggingface() takes batches that are mappings, such as a BatchEncoding, got {type(batch).__name__}. Use a "
        "collator that returns a dict with 'labels', or write Objective(loss, units)."
    )


def _check_uncoupled(batch: Mapping[str, Any]) -> None:
    if batch.get("return_loss"):
        raise LossError(
            "return_loss asks for a contrastive loss, in which every row looks at all others: no sum over micro-batches is the "
            "batch's. Leave it out of the batch and use Coupled(encode, clip_loss()), where encode(model, batch) returns the "
            "image and the text embeddings; give objective.parameters() to the optimizer too."
        )


def _are_pairs(batch: Batch) -> bool:
    """True for preferences: one chosen and one rejected answer per row, and a loss that is a mean over rows."""
    return isinstance(batch, Mapping) and {"chosen_input_ids", "rejected_input_ids"} <= batch.keys()


def _answer_units(batch: Mapping[str, Any]) -> Number:
    """Count answers within the text; the losses of start and end are averaged separately."""
    length = batch["input_ids"].shape[1]
    starts, ends = (int((batch[key] < length).sum()) for key in ("start_positions", "end_positions"))
    if starts != ends:
        raise UnitsError(
            f"{starts} start positions but {ends} end positions lie within the {length} tokens: their losses are averaged over "
            "different counts, and no one number of units is exact. Drop the rows whose answer is cut off."
        )
    return starts


def _loss_of(model: nn.Module, batch: Batch) -> Tensor:
    value = getattr(model(**batch), "loss", None)
    if not isinstance(value, Tensor):
        raise LossError(
            f"{type(_base_model(model)).__name__} returned no .loss for a batch with keys {', '.join(map(str, batch))}. Add "
            "'labels' to the batch, or use supervised() or Objective() for a model that leaves the loss to you."
        )
    return value


def _check_means(model: nn.Module, batch: Batch, loss: Tensor, observed: ObservedMeans) -> None:
    """Refuse a loss that is anything but one mean over the units that were counted."""
    base, is_ctc = _base_model(model), _is_ctc(model)
    name = type(base).__name__
    if not is_ctc:
        counted = float(label_units(batch, is_shifted=_predicts_next_token(base)))
        _check_units(name, counted, [float(number) for number in observed.units])
    nodes = list(nodes_named(loss, "CtcLoss")) if is_ctc else observed.nodes
    if any(True for _ in leaves_of([loss], beyond=nodes)):  # a gradient that does not come from the means
        raise UnitsError(
            f"{name} returned a loss that adds something to the mean over its labels (a router's balance, say), which has a "
            "gradient and is no mean over labels. Switch it off (output_router_logits=False), or write Objective(loss, units)."
        )
    if not is_ctc:
        _check_scale(name, loss, observed.means)


def _check_units(name: str, counted: float, seen: list[float]) -> None:
    if not seen:
        raise UnitsError(
            f"{name} computes its loss by none of torch's mean-reducing functions, so what it divides by could not be seen. "
            "Give huggingface(units=...), a function of the batch, or write Objective(loss, units)."
        )
    if any(number != counted for number in seen):
        raise UnitsError(
            f"{name} averaged its loss over {', '.join(f'{number:g}' for number in seen)} targets, but the labels of this "
            f"micro-batch count {counted:g}. Give huggingface(units=...), a function of the batch that returns what the loss "
            "divides by; several different numbers are several losses, and no one number of units is exact."
        )


def _check_scale(name: str, loss: Tensor, means: list[Tensor]) -> None:
    """Refuse a multiple of the mean that was seen; question answering averages two means."""
    returned, mean = float(loss.detach()), sum(float(mean) for mean in means) / len(means)
    tolerance = 1e-2 if is_low(loss) or any(is_low(mean) for mean in means) else 1e-5
    if not math.isclose(returned, mean, rel_tol=tolerance, abs_tol=1e-6) and not math.isnan(mean):
        raise UnitsError(
            f"{name} returned a loss of {returned:g}, but the mean over its labels is {mean:g}: it adds or scales something (a "
            "router's balance, say) that is no mean over labels. Switch it off, or write Objective(loss, units)."
        )


def _is_ctc(model: nn.Module) -> bool:
    return type(_base_model(model)).__name__.endswith("ForCTC")


def _reduction_of(model: nn.Module) -> Reduction:
    config = getattr(_base_model(model), "config", None)
    return "sum" if _is_ctc(model) and getattr(config, "ctc_loss_reduction", "mean") == "sum" else "mean"


def _predicts_next_token(base: nn.Module) -> bool:
    is_encoder_decoder = getattr(getattr(base, "config", None), "is_encoder_decoder", False)
    return not is_encoder_decoder and _PREDICTS_NEXT_TOKEN.search(type(base).__name__) is not None


def _base_model(model: nn.Module) -> nn.Module:
    """Return the transformers model inside DistributedDataParallel, torch.compile or PEFT."""
    inner: Any = unwrapped(model)
    while hasattr(inner, "get_base_model"):
        inner = unwrapped(inner.get_base_model())
    return inner  # type: ignore[no-any-return]
