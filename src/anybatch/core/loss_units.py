"""One table of the numbers that torch's mean-reducing losses divide by: their units.

A rule counts the units on the target, with the options of the criterion or of the functional call. Where every row has the same
number of elements, most rules differ by a constant factor only, which the shares of micro-batches do not see.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Units = float | Tensor
Rule = Callable[[Tensor, Any], Units]
"""(target, options) -> units; options carry `weight`, `ignore_index` as the criterion or the functional call does."""


def class_units(target: Tensor, options: Any) -> Units:
    """Cross entropy and NLL: the targets that are not ignored, each with its class weight.

    Class probabilities are averaged over rows and positions, class weights or not; dim 1 is the classes.
    """
    if target.is_floating_point():
        return target.numel() // target.shape[1] if target.dim() > 1 else target.numel()
    ignore_index = -100 if options.ignore_index is None else options.ignore_index
    if options.weight is None:
        return count_other_than(target, ignore_index)
    is_counted = target != ignore_index
    weight = options.weight.to(target.device, _exact(target))
    total: Tensor = weight[target[is_counted]].sum()
    return total


def count_other_than(target: Tensor, ignored: int) -> Units:
    """How many elements differ from `ignored`; a few on the CPU are counted in Python, 5 times faster than by three ops."""
    if target.dim() == 1 and target.is_cpu and target.shape[0] <= 256:
        return target.shape[0] - target.tolist().count(ignored)
    return (target != ignored).count_nonzero()


def element_units(target: Tensor, options: Any) -> Units:
    """Element-wise means: the elements of the target, weighted or not."""
    return target.numel()


def weighted_element_units(target: Tensor, options: Any) -> Units:
    """`F.mse_loss` and `F.l1_loss`: the elements, or the sum of their weights where there are some."""
    weight = getattr(options, "weight", None)
    return target.numel() if weight is None else weight.to(_exact(weight)).sum()


def row_units(target: Tensor, options: Any) -> Units:
    """Means over rows: one loss per row, whatever its elements."""
    return target.shape[0] if target.dim() > 0 else 1


def position_units(target: Tensor, options: Any) -> Units:
    """Means over all dims but the last, which holds the classes or the features."""
    return target.numel() // max(target.shape[-1], 1) if target.dim() > 0 else 1


def kl_units(target: Tensor, options: Any) -> Units:
    """KL divergence: its elements, or with `reduction="batchmean"` its rows."""
    return row_units(target, options) if options.reduction == "batchmean" else element_units(target, options)


def ctc_units(target: Tensor, options: Any) -> Units:
    """CTC: the rows; each row's loss is divided by the length of its own target before."""
    lengths = options.target_lengths
    return lengths.numel() if isinstance(lengths, Tensor) else len(lengths) if hasattr(lengths, "__len__") else 1


def _exact(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.device.type != "mps" else torch.float32


RULES: Mapping[type[nn.Module], Rule] = {
    nn.CrossEntropyLoss: class_units,
    nn.LinearCrossEntropyLoss: class_units,
    nn.NLLLoss: class_units,
    nn.NLLLoss2d: class_units,
    nn.L1Loss: element_units,
    nn.MSELoss: element_units,
    nn.SmoothL1Loss: element_units,
    nn.HuberLoss: element_units,
    nn.BCELoss: element_units,
    nn.BCEWithLogitsLoss: element_units,
    nn.PoissonNLLLoss: element_units,
    nn.GaussianNLLLoss: element_units,
    nn.HingeEmbeddingLoss: element_units,
    nn.SoftMarginLoss: element_units,
    nn.KLDivLoss: kl_units,
    nn.MarginRankingLoss: element_units,
    nn.CosineEmbeddingLoss: row_units,
    nn.MultiLabelMarginLoss: row_units,
    nn.MultiLabelSoftMarginLoss: position_units,
    nn.MultiMarginLoss: row_units,
    nn.TripletMarginLoss: row_units,  # counted on the inputs of the model, whose last dim is not the features
    nn.TripletMarginWithDistanceLoss: row_units,
    nn.CTCLoss: row_units,
}
"""By criterion; counted on the target of the batch."""

FUNCTIONAL_RULES: Mapping[Callable[..., Tensor], Rule] = {
    F.cross_entropy: class_units,
    F.linear_cross_entropy: class_units,
    F.nll_loss: class_units,
    F.l1_loss: weighted_element_units,
    F.mse_loss: weighted_element_units,
    F.smooth_l1_loss: element_units,
    F.huber_loss: element_units,
    F.binary_cross_entropy: element_units,
    F.binary_cross_entropy_with_logits: element_units,
    F.poisson_nll_loss: element_units,
    F.gaussian_nll_loss: element_units,
    F.hinge_embedding_loss: element_units,
    F.soft_margin_loss: element_units,
    F.kl_div: kl_units,
    F.margin_ranking_loss: element_units,
    F.cosine_embedding_loss: row_units,
    F.multilabel_margin_loss: row_units,
    F.multilabel_soft_margin_loss: position_units,
    F.multi_margin_loss: row_units,
    F.triplet_margin_loss: position_units,
    F.triplet_margin_with_distance_loss: position_units,
    F.ctc_loss: ctc_units,
}
"""By functional form, as a model may call it inside; counted on the target of the call, or else on its first tensor."""
