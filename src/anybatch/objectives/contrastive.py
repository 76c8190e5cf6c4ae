"""Contrastive losses for `Coupled`: every other row of the batch is a negative."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.core import at_least_fp32
from anybatch.errors import LossError


def info_nce(temperature: float = 0.05, *, symmetric: bool = False, learned: bool = False) -> "InfoNCE":
    """Make an in-batch InfoNCE loss, to be used as `Coupled(encode, info_nce())`.

    Args:
        temperature: Divisor of the cosine similarities; the initial one if it is learned.
        symmetric: Average with the loss of each key finding its query.
        learned: Make the temperature a parameter, as a logarithm. Give `objective.parameters()` to the optimizer too.

    Returns:
        An `InfoNCE` module, a function of `(queries, keys)` or `(queries, keys, negatives, ...)`.

    Raises:
        LossError: If the temperature is not above 0.

    >>> pair = torch.eye(3), torch.eye(3)
    >>> round(float(info_nce(temperature=1.0)(pair)), 4)
    0.5514
    """
    return InfoNCE(temperature, is_symmetric=symmetric, is_learned=learned)


def clip_loss(temperature: float = 0.07, *, learned: bool = True) -> "InfoNCE":
    """Make CLIP's symmetric loss of `(images, texts)`, with its learned temperature.

    Args:
        temperature: Divisor of the cosine similarities; the initial one if it is learned.
        learned: Make the temperature a parameter. Give `objective.parameters()` to the optimizer too.

    Returns:
        The same loss as `info_nce(temperature, symmetric=True, learned=learned)`.

    Raises:
        LossError: If the temperature is not above 0.

    >>> [name for name, _ in clip_loss().named_parameters()]
    ['log_scale']
    """
    return InfoNCE(temperature, is_symmetric=True, is_learned=learned)


class InfoNCE(nn.Module):
    """In-batch InfoNCE: each query has to find its own key among all keys and negatives of the batch.

        loss = mean_i cross_entropy(q_i . [keys, negatives] / temperature, i)

    Similarity is the cosine, computed in fp32 or better. Every row's negatives serve all rows.

    Args:
        temperature: Divisor of the similarities, above 0.
        is_symmetric: Average with the loss of each key finding its query.
        is_learned: Keep the logarithm of 1 / temperature as the parameter `log_scale`; else as a buffer.

    Raises:
        LossError: If the temperature is not above 0.
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
        """The temperature now, without a graph."""
        return (-self.log_scale).exp().detach()

    def forward(self, representations: Any) -> Tensor:
        """Return the mean loss of all rows.

        Args:
            representations: `(queries, keys, *negatives)` in a tuple, list or mapping, rows first. Negatives are one per row
                (rows x width) or several (rows x n x width).

        Raises:
            LossError: If there are fewer than two tensors.
        """
        columns = list(representations.values() if isinstance(representations, Mapping) else representations)
        if isinstance(representations, Tensor) or len(columns) < 2:
            raise LossError(
                f"this loss takes (queries, keys) or (queries, keys, negatives), got {type(representations).__name__} of "
                f"{len(columns)}. Make encode return at least two tensors, one row of each per row of the micro-batch."
            )
        scale = self.log_scale.to(columns[0].device, non_blocking=True).exp()
        queries, keys, *negatives = (F.normalize(at_least_fp32(column), dim=-1) for column in columns)
        candidates = torch.cat([keys, *(negative.flatten(0, -2) for negative in negatives)])
        with torch.autocast(queries.device.type, enabled=False):
            own = torch.arange(len(queries), device=queries.device)
            loss = F.cross_entropy(queries @ candidates.T * scale, own)
            if self.is_symmetric:
                loss = (loss + F.cross_entropy(keys @ queries.T * scale, own)) / 2
        return loss
