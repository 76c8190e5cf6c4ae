"""Numbers that an objective returns beside its loss, put together so that they hold for the whole batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from anybatch.errors import LossError

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
            values.append(_scalar(name, metric.value))
            weights.append(1.0)
            continue
        if not isinstance(metric, Mean):
            metric = Mean(metric)
        weight = part_units if metric.units is None else metric.units
        values.append(_scalar(name, metric.value))
        weights.append(weight)
        divisors.append(weight)
    stacked = torch.stack(values)
    weighted = stacked * _stack(weights, stacked)
    # a mean over nothing is nan, and must not make the whole nan
    total = weighted.masked_fill(_stack(weights, stacked) == 0, 0).sum()
    return total / _stack(divisors, stacked).sum() if divisors else total


def detached(metrics: Metrics) -> Metrics:
    """The same numbers without the graph they came from, which would keep a micro-batch's activations alive."""
    return {name: _detached(name, metric) for name, metric in metrics.items()}


def _detached(name: str, metric: Metric) -> Metric:
    if isinstance(metric, Tensor):
        return metric.detach()
    if not isinstance(metric, Sum | Mean | int | float):
        raise LossError(
            f"the metric {name!r} is a {type(metric).__name__}: {metric!r:.60}; expected a number, a tensor of one, Sum(...) "
            "or Mean(...)."
        )
    if isinstance(metric, Sum | Mean) and isinstance(metric.value, Tensor):
        return replace(metric, value=metric.value.detach())
    return metric


def _scalar(name: str, value: Number) -> Tensor:
    tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
    if tensor.numel() != 1:
        raise LossError(
            f"the metric {name!r} has shape {tuple(tensor.shape)}; expected one number. Return its mean, or Sum(its sum)."
        )
    if not tensor.is_floating_point():
        tensor = tensor.to(torch.float64 if tensor.device.type != "mps" else torch.float32)  # counts stay whole
    return (tensor.float() if tensor.itemsize < 4 else tensor).reshape(())


def _stack(numbers: Sequence[Number], like: Tensor) -> Tensor:
    if not any(isinstance(number, Tensor) for number in numbers):
        return torch.tensor(numbers, dtype=like.dtype, device=like.device)
    return torch.stack([torch.as_tensor(number, dtype=like.dtype, device=like.device) for number in numbers])
