"""Ready-made contrastive losses for `Coupled`: every other row of the batch is a negative."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.core import at_least_fp32
from anybatch.errors import LossError


class InfoNCE(nn.Module):
    """Each query is to find its own key among all keys of the batch, and all negatives.

        loss = mean_i cross_entropy(q_i . [keys, negatives] / temperature, i)

    Takes `(queries, keys)` or `(queries, keys, negatives, ...)`, in a tuple, list or mapping, rows first. Negatives are one per
    row (rows x width) or several (rows x n x width); every row's negatives serve all rows. Similarity is the cosine. The
    arithmetic is fp32 or better.
    """

    def __init__(self, temperature: float, *, is_symmetric: bool, is_learned: bool) -> None:
        super().__init__()
        if not temperature > 0:
            raise LossError(f"temperature={temperature!r}: expected a number above 0, such as 0.05.")
        self.is_symmetric = is_symmetric
        log_scale = torch.tensor(-math.log(temperature))
        if is_learned:
            self.log_scale = nn.Parameter(log_scale)
        else:
            self.register_buffer("log_scale", log_scale, persistent=False)

    @property
    def temperature(self) -> Tensor:
        return (-self.log_scale).exp().detach()

    def forward(self, representations: Any) -> Tensor:
        queries, keys, *negatives = _columns(representations)
        scale = self.log_scale.to(queries.device, non_blocking=True).exp()
        queries, keys = _unit(queries), _unit(keys)
        candidates = torch.cat([keys, *(_unit(negative).flatten(0, -2) for negative in negatives)])
        with torch.autocast(queries.device.type, enabled=False):
            own = torch.arange(len(queries), device=queries.device)
            loss = F.cross_entropy(queries @ candidates.T * scale, own)
            if self.is_symmetric:
                loss = (loss + F.cross_entropy(keys @ queries.T * scale, own)) / 2
        return loss


def info_nce(temperature: float = 0.05, *, symmetric: bool = False, learned: bool = False) -> InfoNCE:
    """In-batch InfoNCE of `(queries, keys)` or `(queries, keys, negatives, ...)`; see `InfoNCE`.

    `symmetric` adds the loss of each key finding its query. With `learned`, the temperature is a parameter, in the
    logarithm: give `objective.parameters()` to the optimizer too.

    >>> pair = torch.eye(3), torch.eye(3)
    >>> round(float(info_nce(temperature=1.0)(pair)), 4)
    0.5514
    """
    return InfoNCE(temperature, is_symmetric=symmetric, is_learned=learned)


def clip_loss(temperature: float = 0.07, *, learned: bool = True) -> InfoNCE:
    """The symmetric loss of CLIP for `(images, texts)`, with its learned temperature that starts at 0.07.

    >>> [name for name, _ in clip_loss().named_parameters()]
    ['log_scale']
    """
    return InfoNCE(temperature, is_symmetric=True, is_learned=learned)


def _columns(representations: Any) -> list[Tensor]:
    columns = list(representations.values() if isinstance(representations, Mapping) else representations)
    if isinstance(representations, Tensor) or len(columns) < 2:
        raise LossError(
            f"this loss takes (queries, keys) or (queries, keys, negatives), got {type(representations).__name__} of "
            f"{len(columns)}. Make encode return at least two tensors, one row of each per row of the micro-batch."
        )
    return columns


def _unit(vectors: Tensor) -> Tensor:
    return F.normalize(at_least_fp32(vectors), dim=-1)
