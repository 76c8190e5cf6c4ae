"""Numbers that an objective returns beside its loss, put together so that they hold for the whole batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Number = float | Tensor


@dataclass(frozen=True, slots=True)
class Sum:
    """A metric that adds up over micro-batches: a count of correct rows, of tokens."""

    value: Number


@dataclass(frozen=True, slots=True)
class Mean:
    """A metric that is a mean over `units` of this micro-batch; None means the units of the loss."""

    value: Number
    units: Number | None = None


Metric = Sum | Mean | Number
"""A bare number is a mean over the units of the loss."""
Metrics = Mapping[str, Metric]


def combine(parts: Sequence[Metrics], units: Sequence[float]) -> dict[str, Tensor]:
    """The metrics of the whole batch from those of its micro-batches, whose losses averaged over `units`.

    A micro-batch that lacks a metric has no part in it. A mean over 0 units is nan.

    >>> combine([{"error": 0.5, "seen": Sum(2)}, {"error": 0.0, "seen": Sum(3)}], units=[2, 6])
    {'error': tensor(0.1250), 'seen': tensor(5.)}
    """
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _combine_one(name, parts, units) for name in names}


def _combine_one(name: str, parts: Sequence[Metrics], units: Sequence[float]) -> Tensor:
    values: list[Tensor] = []
    weights: list[Number] = []
    divisors: list[Number] = []
    for part, part_units in zip(parts, units, strict=True):
        if name not in part:
            continue
        metric = part[name]
        if isinstance(metric, Sum):
            values.append(_scalar(metric.value))
            weights.append(1.0)
            continue
        if not isinstance(metric, Mean):
            metric = Mean(metric)
        weight = part_units if metric.units is None else metric.units
        values.append(_scalar(metric.value))
        weights.append(weight)
        divisors.append(weight)
    stacked = torch.stack(values)
    weighted = stacked * _stack(weights, stacked)
    # a mean over nothing is nan, and must not make the whole nan
    total = weighted.masked_fill(_stack(weights, stacked) == 0, 0).sum()
    return total / _stack(divisors, stacked).sum() if divisors else total


def _scalar(value: Number) -> Tensor:
    tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
    return tensor.float() if not tensor.is_floating_point() or tensor.itemsize < 4 else tensor


def _stack(numbers: Sequence[Number], like: Tensor) -> Tensor:
    if not any(isinstance(number, Tensor) for number in numbers):
        return torch.tensor(numbers, dtype=like.dtype, device=like.device)
    return torch.stack([torch.as_tensor(number, dtype=like.dtype, device=like.device) for number in numbers])
