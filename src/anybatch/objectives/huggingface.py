"""`huggingface()`: the objective of models that compute their own loss from `labels`.

Units are the labels that the loss really averaged, never a promise read off a signature: 14 of 18 classes tried accept
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
IGNORED = -100
_PREDICTS_NEXT_TOKEN = re.compile(r"CausalLM|LMHead|ForConditionalGeneration")


def huggingface(*, loss: ModelLoss | None = None, units: Units | None = None) -> Objective:
    """The objective `model(**batch).loss`, averaged over the labels that are not ignored.

    `loss(model, batch)` stands for it where a trainer computes the loss, such as `trainer.compute_loss`: of supervised
    fine-tuning it is averaged over the labels too; of preferences (DPO: a batch with `chosen_input_ids` and
    `rejected_input_ids`) over pairs.

    Causal language models shift the labels by one inside; masked, sequence-to-sequence and classification heads do not. CTC
    heads average, or sum, over rows, as their configuration says. Which is the case is known from the model, and checked once
    against what the loss was seen to divide by; a head that divides by something else gives an error that says by how much, to
    be mended with `units=`, a function of the batch. A head that adds something to that mean is refused, however little it is.
    """

    # what has been checked is remembered so that it is checked once; it changes no result
    checked: WeakSet[nn.Module] = WeakSet()

    def compute(model: nn.Module, batch: Batch) -> Tensor:
        _check_uncoupled(batch)
        return _loss_of(model, batch) if loss is None else loss(model, batch)

    def checked_once(model: nn.Module, batch: Batch) -> Tensor:
        is_known = units is not None or model in checked or _are_pairs(batch)
        if is_known or inside_compiled(model) is not None or _has_no_numbers(model):
            return compute(model, batch)
        with ObservedMeans() as observed:
            value = compute(model, batch)
        _check_means(model, batch, value, observed)
        if value.requires_grad:
            checked.add(model)
        return value

    def units_for(model: nn.Module) -> Units:
        if _is_ctc(model):  # the rows: of each, the loss divides by the length of its own target first, if at all
            return lambda batch: len(_mapping(batch)["labels"])
        return partial(label_units, is_shifted=_predicts_next_token(_base_model(model)))

    if units is not None:
        return Objective(checked_once, units, reduction_for=_reduction_of)
    return Objective(checked_once, next_token_units, units_for=units_for, reduction_for=_reduction_of)


def next_token_units(batch: Batch) -> Number:
    """Count the labels that a causal language model averages over."""
    return label_units(batch, is_shifted=True)


def label_units(batch: Batch, *, is_shifted: bool) -> Number:
    """Count labels that are not ignored, and for next-token prediction not the first of a row, which nothing predicts."""
    batch = _mapping(batch)
    _check_uncoupled(batch)
    if _are_pairs(batch):
        return len(batch["chosen_input_ids"])
    if isinstance(batch.get("start_positions"), Tensor):
        return _answer_units(batch)
    is_ready = isinstance(batch.get("shift_labels"), Tensor)
    labels = batch.get("shift_labels" if is_ready else "labels")
    if not isinstance(labels, Tensor):
        raise UnitsError(
            f"the batch has no tensor 'labels' (keys: {', '.join(map(str, batch))}), so there is no loss to count the units "
            "of. Add 'labels', or give huggingface(units=...), a function of the batch."
        )
    if labels.is_floating_point():
        return labels.numel()
    return ((labels[..., 1:] if is_shifted and not is_ready else labels) != IGNORED).count_nonzero()


def _mapping(batch: Batch) -> Mapping[str, Any]:
    if isinstance(batch, Mapping):
        return batch
    raise BatchError(
        f"huggingface() takes batches that are mappings, such as a BatchEncoding, got {type(batch).__name__}. Use a "
        "collator that returns a dict with 'labels', or write Objective(loss, units)."
    )


def _check_uncoupled(batch: Mapping[str, Any]) -> None:
    """Refuse a contrastive loss, in which every row looks at every other: no units make it a mean over rows."""
    if batch.get("return_loss"):
        raise LossError(
            "return_loss asks for a contrastive loss, in which every row looks at all others: no sum over micro-batches is the "
            "batch's. Leave it out of the batch and use Coupled(encode, clip_loss()), where encode(model, batch) returns the "
            "image and the text embeddings; give objective.parameters() to the optimizer too."
        )


def _answer_units(batch: Mapping[str, Any]) -> Number:
    """Count answers within the text; start and end are averaged each on its own."""
    length = batch["input_ids"].shape[1]
    starts, ends = (int((batch[key] < length).sum()) for key in ("start_positions", "end_positions"))
    if starts != ends:
        raise UnitsError(
            f"{starts} start positions but {ends} end positions lie within the {length} tokens: their losses are averaged over "
            "different counts, and no one number of units is exact. Drop the rows whose answer is cut off."
        )
    return starts


def _are_pairs(batch: Batch) -> bool:
    """True of preferences, one chosen and one rejected answer per row: their loss is a mean over rows."""
    return isinstance(batch, Mapping) and {"chosen_input_ids", "rejected_input_ids"} <= batch.keys()


def _loss_of(model: nn.Module, batch: Batch) -> Tensor:
    value = getattr(model(**batch), "loss", None)
    if not isinstance(value, Tensor):
        raise LossError(
            f"{type(_base_model(model)).__name__} returned no .loss for a batch with keys {', '.join(map(str, batch))}. Add "
            "'labels' to the batch, or use supervised() or Objective() for a model that leaves the loss to you."
        )
    return value


def _check_means(model: nn.Module, batch: Batch, loss: Tensor, observed: ObservedMeans) -> None:
    """Refuse a loss that is not the one mean over labels that its units say."""
    base = _base_model(model)
    if _is_ctc(model):
        _check_nothing_added(base, loss, [])
        return
    _check_units(base, batch, observed.units)
    _check_nothing_added(base, loss, observed.nodes)
    _check_scale(base, loss, observed.means)


def _check_units(base: nn.Module, batch: Batch, observed: list[Number]) -> None:
    counted = float(label_units(batch, is_shifted=_predicts_next_token(base)))
    seen = [float(number) for number in observed]
    if not seen:
        raise UnitsError(
            f"{type(base).__name__} computes its loss by none of torch's mean-reducing functions, so what it divides by could "
            "not be seen. Give huggingface(units=...), a function of the batch, or write Objective(loss, units)."
        )
    if any(number != counted for number in seen):
        raise UnitsError(
            f"{type(base).__name__} averaged its loss over {', '.join(f'{number:g}' for number in seen)} targets, but the "
            f"labels of this micro-batch count {counted:g}. Give huggingface(units=...), a function of the batch that returns "
            "what the loss divides by; several different numbers are several losses, and no one number of units is exact."
        )


def _check_nothing_added(base: nn.Module, loss: Tensor, means: list[Any]) -> None:
    """Refuse a loss whose gradient reaches a parameter past the means over labels that were seen: it adds something."""
    if not loss.requires_grad:
        return
    nodes = means or list(nodes_named(loss, "CtcLoss"))
    if any(True for _ in leaves_of([loss], beyond=nodes)):
        raise UnitsError(
            f"{type(base).__name__} returned a loss that adds something to the mean over its labels (a router's "
            "balance, say), which has a gradient and is no mean over labels. Switch it off (output_router_logits=False), or "
            "write Objective(loss, units)."
        )


def _check_scale(base: nn.Module, loss: Tensor, means: list[Tensor]) -> None:
    """Refuse a multiple of the mean over the labels that was seen (question answering has two, averaged)."""
    returned, mean = float(loss.detach()), sum(float(mean) for mean in means) / len(means)
    tolerance = 1e-2 if is_low(loss) or any(is_low(mean) for mean in means) else 1e-5
    if not math.isclose(returned, mean, rel_tol=tolerance, abs_tol=1e-6) and not math.isnan(mean):
        raise UnitsError(
            f"{type(base).__name__} returned a loss of {returned:g}, but the mean over its labels is {mean:g}: "
            "it adds or scales something (a router's balance, say) that is no mean over labels. Switch it off, or "
            "write Objective(loss, units)."
        )


def _is_ctc(model: nn.Module) -> bool:
    return type(_base_model(model)).__name__.endswith("ForCTC")


def _reduction_of(model: nn.Module) -> Reduction:
    """Return the reduction of the head: CTC may sum over rows, by its configuration; all others average."""
    config = getattr(_base_model(model), "config", None)
    return "sum" if _is_ctc(model) and getattr(config, "ctc_loss_reduction", "mean") == "sum" else "mean"


def _has_no_numbers(model: nn.Module) -> bool:
    """True of the fake copies that memory is planned with: what a loss divides by cannot be read off them."""
    return isinstance(next(model.parameters(), None), FakeTensor)


def _predicts_next_token(base: nn.Module) -> bool:
    is_encoder_decoder = getattr(getattr(base, "config", None), "is_encoder_decoder", False)
    return not is_encoder_decoder and _PREDICTS_NEXT_TOKEN.search(type(base).__name__) is not None


def _base_model(model: nn.Module) -> nn.Module:
    """Return the transformers model inside DistributedDataParallel, torch.compile or PEFT."""
    inner: Any = unwrapped(model)
    while hasattr(inner, "get_base_model"):
        inner = unwrapped(inner.get_base_model())
    return inner  # type: ignore[no-any-return]
