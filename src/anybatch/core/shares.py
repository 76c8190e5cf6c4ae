"""The share of each part in the loss of the whole: what it averaged over, out of all."""

from collections.abc import Sequence

import torch
from torch import Tensor

from anybatch.core.batch import sent
from anybatch.core.low_precision import at_least_fp32
from anybatch.core.option_types import Reduction


def shares_of(units: Sequence[float], reduction: Reduction) -> list[float]:
    """What each mean over `units` weighs in the mean over all of them; sums weigh 1 each.

    >>> shares_of([6, 2], "mean"), shares_of([6, 2], "sum")
    ([0.75, 0.25], [1.0, 1.0])
    """
    if reduction == "sum":
        return [1.0] * len(units)
    total = sum(units) or 1.0
    return [one / total for one in units]


def weighted_sum(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum_k weight_k * loss_k, in fp32 or better; 0 for no losses."""
    if not losses:
        return torch.zeros(())
    stacked = at_least_fp32(torch.stack(tuple(losses)))
    return stacked.dot(sent(weights, stacked.device, stacked.dtype))
