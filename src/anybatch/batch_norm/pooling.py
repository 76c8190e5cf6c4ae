"""Mean and variance of the values that a layer was given, pooled over micro-batches and ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from anybatch.batch_norm.layers import Call
from anybatch.core import Ranks, sent


@dataclass(frozen=True, slots=True)
class MeanAndVariance:
    """Mean and biased variance per channel of some values, and how many they were."""

    count: int
    mean: Tensor
    var: Tensor
    momentum: float
    """What the layer weighs these statistics with in its running ones."""
    is_averaged: bool = False
    """True of InstanceNorm: means over `count` rows of each row's own mean and unbiased variance."""


def pool(parts: list[MeanAndVariance]) -> MeanAndVariance:
    """The statistics of all values together (Chan's formula); autograd sees through it.

    mean = sum n_k mean_k / n,   var = sum n_k (var_k + (mean_k - mean)^2) / n

    Of rows that each have their own statistics, the variance is the mean of variances.
    """
    total = sum(part.count for part in parts)
    means, variances = torch.stack([part.mean for part in parts]), torch.stack([part.var for part in parts])
    weights = sent([part.count / total for part in parts], means.device, means.dtype)[:, None]
    mean = (weights * means).sum(0)
    is_averaged = parts[0].is_averaged
    var = (weights * (variances if is_averaged else variances + (means - mean).square())).sum(0)
    return MeanAndVariance(total, mean, var, parts[0].momentum, is_averaged)


def nothing(call: Call) -> MeanAndVariance:
    """The statistics of no values, for a layer's running statistics."""
    assert call.running_mean is not None
    assert call.running_var is not None
    nought = torch.zeros_like(call.running_mean), torch.ones_like(call.running_var)
    return MeanAndVariance(0, *nought, call.momentum, call.is_averaged)


def of_every_rank(ranks: Ranks, own: list[MeanAndVariance]) -> list[list[MeanAndVariance]]:
    """The statistics of the same layers on each rank, by rank; one collective for all layers, and no graph."""
    flat = [torch.cat([m.mean.new_tensor([m.count]), m.mean, m.var]).detach().double() for m in own]
    every = ranks.all_rows(torch.cat(flat)[None], [1] * ranks.size)
    by_rank = []
    for told in every:
        pieces = told.split([len(piece) for piece in flat])
        by_rank.append([_unpacked(piece, like) for piece, like in zip(pieces, own, strict=True)])
    return by_rank


def _unpacked(piece: Tensor, like: MeanAndVariance) -> MeanAndVariance:
    mean, var = piece[1:].to(like.mean.dtype).chunk(2)
    return MeanAndVariance(int(piece[0]), mean, var, like.momentum, like.is_averaged)


def pool_over_ranks(ranks: Ranks, own: list[MeanAndVariance]) -> list[MeanAndVariance]:
    """The statistics of each layer over all ranks, the same on every rank."""
    if ranks.size == 1 or not own:
        return own
    columns = zip(*of_every_rank(ranks, own), strict=True)
    return [pool(list(column)) if any(part.count for part in column) else column[0] for column in columns]


@torch.no_grad()
def update_running(call: Call, statistics: MeanAndVariance) -> None:
    """One big-batch update of the running statistics, with the unbiased variance, as torch makes it."""
    bias = 1.0 if statistics.is_averaged else statistics.count / max(statistics.count - 1, 1)
    unbiased = statistics.var * bias
    for running, value in ((call.running_mean, statistics.mean), (call.running_var, unbiased)):
        if running is not None:
            running.lerp_(value.to(running.dtype), statistics.momentum)
