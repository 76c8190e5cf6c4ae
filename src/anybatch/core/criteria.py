"""`supervised(criterion)`, and the units that torch's own criteria average over."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.core.batch import Batch, tensors
from anybatch.core.metrics import Metrics, Number
from anybatch.core.objective import Objective, Units
from anybatch.core.torch_private import is_low
from anybatch.display import name_of
from anybatch.errors import BatchError, LossError, UnitsError

UnitCount = float | Tensor
Rule = Callable[[Tensor, Any], UnitCount]
"""(target, options) -> units; `options` has the attributes of the criterion, such as `weight` and `ignore_index`."""


def class_units(target: Tensor, options: Any) -> UnitCount:
    """Cross entropy and NLL: sum the class weights of the targets that are not ignored.

    For class probabilities, count rows and positions; dim 1 is the classes.
    """
    if target.is_floating_point():
        return target.numel() // target.shape[1] if target.dim() > 1 else target.numel()
    ignore_index = -100 if options.ignore_index is None else options.ignore_index
    if options.weight is None:
        return count_other_than(target, ignore_index)
    total: Tensor = options.weight.to(target.device, _exact(target))[target[target != ignore_index]].sum()
    return total


def count_other_than(target: Tensor, ignored: int) -> UnitCount:
    """Count the elements other than `ignored`. Few elements on the CPU are counted in Python, 5 times as fast."""
    if target.dim() == 1 and target.is_cpu and target.shape[0] <= 256:
        return target.shape[0] - target.tolist().count(ignored)
    return (target != ignored).count_nonzero()


def element_units(target: Tensor, options: Any) -> UnitCount:
    """Element-wise means: count the elements of the target."""
    return target.numel()


def weighted_element_units(target: Tensor, options: Any) -> UnitCount:
    """`F.mse_loss` and `F.l1_loss`: count the elements, or sum their weights."""
    weight = getattr(options, "weight", None)
    return target.numel() if weight is None else weight.to(_exact(weight)).sum()


def row_units(target: Tensor, options: Any) -> UnitCount:
    """Means over rows: count the rows."""
    return target.shape[0] if target.dim() > 0 else 1


def position_units(target: Tensor, options: Any) -> UnitCount:
    """Means over all dims but the last, which holds the classes or the features."""
    return target.numel() // max(target.shape[-1], 1) if target.dim() > 0 else 1


def kl_units(target: Tensor, options: Any) -> UnitCount:
    """KL divergence: count the elements, or with `reduction="batchmean"` the rows."""
    return row_units(target, options) if options.reduction == "batchmean" else element_units(target, options)


def ctc_units(target: Tensor, options: Any) -> UnitCount:
    """CTC: count the rows; each row's loss is already divided by its target's length."""
    lengths = options.target_lengths
    return lengths.numel() if isinstance(lengths, Tensor) else len(lengths) if hasattr(lengths, "__len__") else 1


def _exact(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.device.type != "mps" else torch.float32


_ELEMENTS = (
    *(nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.PoissonNLLLoss),
    *(nn.GaussianNLLLoss, nn.HingeEmbeddingLoss, nn.SoftMarginLoss, nn.MarginRankingLoss),
)
_ROWS = (nn.CosineEmbeddingLoss, nn.MultiLabelMarginLoss, nn.MultiMarginLoss, nn.CTCLoss)
_TRIPLETS = (nn.TripletMarginLoss, nn.TripletMarginWithDistanceLoss)

RULES: Mapping[type[nn.Module], Rule] = {
    **dict.fromkeys((nn.CrossEntropyLoss, nn.LinearCrossEntropyLoss, nn.NLLLoss, nn.NLLLoss2d), class_units),
    **dict.fromkeys(_ELEMENTS, element_units),
    **dict.fromkeys(_ROWS, row_units),
    **dict.fromkeys(_TRIPLETS, row_units),  # counted on the model's inputs, whose last dim is not the features
    nn.KLDivLoss: kl_units,
    nn.MultiLabelSoftMarginLoss: position_units,
}
"""Rules by criterion, for the target of the batch."""

_ELEMENT_FUNCTIONS: tuple[Callable[..., Tensor], ...] = (
    *(F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.poisson_nll_loss),
    *(F.gaussian_nll_loss, F.hinge_embedding_loss, F.soft_margin_loss, F.margin_ranking_loss),
)

FUNCTIONAL_RULES: Mapping[Callable[..., Tensor], Rule] = {
    **dict.fromkeys((F.cross_entropy, F.linear_cross_entropy, F.nll_loss), class_units),
    **dict.fromkeys((F.l1_loss, F.mse_loss), weighted_element_units),
    **dict.fromkeys(_ELEMENT_FUNCTIONS, element_units),
    **dict.fromkeys((F.cosine_embedding_loss, F.multilabel_margin_loss, F.multi_margin_loss), row_units),
    **dict.fromkeys((F.triplet_margin_loss, F.triplet_margin_with_distance_loss), position_units),
    F.multilabel_soft_margin_loss: position_units,
    F.kl_div: kl_units,
    F.ctc_loss: ctc_units,
}
"""Rules by function, for a call inside a model: counted on the target of the call, or else on its first tensor."""


def supervised(
    criterion: Callable[..., Tensor],
    *,
    units: Units | None = None,
    metrics: Callable[..., Metrics] | None = None,
) -> Objective:
    """Return the objective `criterion(model(inputs), targets)` for batches of `(inputs, targets)`.

    A tuple, or a list of tensors, of inputs or outputs is unpacked: batches `(inputs, targets, input_lengths,
    target_lengths)` serve CTC, and a model that returns (anchor, positive, negative) serves `((a, p, n),)`. A mapping of
    inputs is passed by keyword. The criterion gets bf16 and fp16 outputs in fp32.

    Args:
        criterion: A criterion of torch, such as `nn.CrossEntropyLoss()`, or any function of (outputs, *targets) that returns
            a mean loss. `reduction="sum"` accumulates as a sum.
        units: `units(batch)` returns the number that the mean divides by. Needed only for criteria that are not torch's.
        metrics: `metrics(outputs, *targets)` returns numbers to report with the loss, as a dict.

    Returns:
        An objective for `Update`, `Accumulator`, `plan` and `verify`.

    Raises:
        UnitsError: If `units` is needed and not given, or the criterion has `reduction="none"`.

    Example:
        >>> objective = supervised(nn.CrossEntropyLoss(ignore_index=0))
        >>> int(objective.units((torch.zeros(4, 5), torch.tensor([0, 3, 1, 0]))))
        2
    """
    reduction: Literal["mean", "sum"] = "sum" if getattr(criterion, "reduction", "mean") == "sum" else "mean"
    is_element_wise = RULES.get(type(criterion)) is element_units  # type: ignore[arg-type]
    if units is None:
        rule = _rule_of(criterion)

        def units(batch: Batch) -> Number:
            target = _units_target(batch)
            if is_element_wise:
                _check_weight(criterion, target)
            return rule(target, criterion)

    def loss(model: nn.Module, batch: Batch) -> Tensor | tuple[Tensor, Metrics]:
        inputs, targets = _inputs_and_targets(batch)
        outputs = model(inputs) if isinstance(inputs, Tensor) else _call(model, inputs)
        arguments = _arguments(criterion, outputs, targets)
        if is_element_wise:
            _check_dimensions(arguments)
        value = criterion(*_in_fp32(criterion, arguments))
        return value if metrics is None else (value, metrics(outputs, *targets))

    loss.__qualname__ = f"supervised({name_of(criterion)})"  # its repr
    return Objective(loss, units, reduction)


def _rule_of(criterion: Callable[..., Tensor]) -> Rule:
    name = getattr(criterion, "__name__", None) or repr(criterion)
    # a subclass may divide by something else
    rule = RULES.get(type(criterion))  # type: ignore[arg-type]
    if rule is None:
        raise UnitsError(
            f"supervised({name}): only instances of torch's own criteria, such as nn.CrossEntropyLoss(), say what their mean "
            "divides by. Give units=, a function of the batch: supervised(criterion, units=rows) if it averages over rows, or "
            "for example units=lambda batch: (batch[1] != -100).sum() if it averages over targets."
        )
    reduction = getattr(criterion, "reduction", "mean")
    if reduction not in ("mean", "sum", "batchmean"):
        raise UnitsError(
            f"supervised({name}): reduction={reduction!r} returns one loss per element; expected 'mean' or 'sum'. "
            "Leave reduction at its default, or write the reduction in Objective(loss, units)."
        )
    return rule


def _check_weight(criterion: Callable[..., Tensor], target: Tensor) -> None:
    """Refuse weights of an element-wise criterion with one entry per row of one batch."""
    weight = getattr(criterion, "weight", None)
    if isinstance(weight, Tensor) and 0 < target.dim() == weight.dim() and weight.shape[0] != 1:
        raise UnitsError(
            f"the criterion's weight has shape {tuple(weight.shape)}, one entry per row of one particular batch, and cannot "
            "be cut with the rows. Put the weights into the batch and use Objective(loss), with "
            "F.binary_cross_entropy(output, target, weight=weights) as the loss."
        )


def _inputs_and_targets(batch: Batch) -> tuple[Any, tuple[Any, ...]]:
    if not isinstance(batch, (tuple, list)) or not batch:
        keys = f" with keys {list(batch)}" if isinstance(batch, Mapping) else ""
        raise BatchError(
            f"supervised() takes batches of (inputs, targets), got {type(batch).__name__}{keys}. Make the loader yield a "
            "tuple, or write Objective(lambda model, batch: ...)."
        )
    return batch[0], tuple(batch[1:])


def _units_target(batch: Batch) -> Tensor:
    """Return the tensor that units are counted on: the target, or the inputs if there is none (triplets)."""
    inputs, targets = _inputs_and_targets(batch)
    counted: Any = targets[0] if targets and targets[0] is not None else inputs
    first = counted if isinstance(counted, Tensor) else next(tensors(counted), None)
    if first is None:
        got = f"supervised() counts units on a target tensor, got {type(counted).__name__} {counted!r}"[:160]
        raise BatchError(
            f"{got}. Make the loader yield targets as a tensor, such as torch.tensor([0, 2, 1]) for classes."
        )
    return first


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if _is_several(inputs) else model(inputs)


def _arguments(criterion: Callable[..., Tensor], outputs: Any, targets: tuple[Any, ...]) -> tuple[Any, ...]:
    if isinstance(outputs, Tensor) and len(targets) == 1 and targets[0] is not None:
        return outputs, targets[0]
    several = tuple(outputs) if _is_several(outputs) else (outputs,)
    given = tuple(target for target in targets if target is not None)
    if isinstance(criterion, nn.GaussianNLLLoss) and len(several) == 2:
        mean, variance = several
        return mean, *given, variance
    return several + given


def _check_dimensions(arguments: tuple[Any, ...]) -> None:
    """Refuse (16, 1) against (16,), which torch broadcasts to (16, 16): rows would depend on each other."""
    first, second = arguments[:2]
    if isinstance(second, Tensor) and first.dim() != second.dim():
        raise LossError(
            f"the output has shape {tuple(first.shape)} and the target {tuple(second.shape)}: torch would broadcast them, and "
            "every row would meet every other's target. Give both the same shape, for example with output.squeeze(1)."
        )


def _in_fp32(criterion: Callable[..., Tensor], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Cast bf16 and fp16 arguments to fp32, as autocast does, unless the criterion holds low-precision tensors itself."""
    if not is_low(arguments[0]):
        return arguments
    own = (*criterion.parameters(), *criterion.buffers()) if isinstance(criterion, nn.Module) else ()
    if any(map(is_low, own)):
        return arguments
    return tuple(argument.float() if is_low(argument) else argument for argument in arguments)


def _is_several(value: Any) -> bool:
    if type(value) is tuple:
        return True
    return type(value) is list and len(value) > 0 and all(isinstance(item, Tensor) for item in value)
