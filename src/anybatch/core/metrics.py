"""Metrics: numbers that an objective returns with its loss, combined over the micro-batches of a batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anybatch.core.batch import tensor_on
from anybatch.core.splits import MicroBatches
from anybatch.core.torch_private import at_least_fp32
from anybatch.errors import LossError

Number = float | Tensor


@dataclass(frozen=True, slots=True)
class Sum:
    """A metric that adds up over micro-batches, such as a count of correct rows.

    Args:
        value: A number, or a tensor with one.

    Example:
        >>> loss = lambda model, x: (model(x).mean(), {"positive": Sum((x > 0).sum())})
    """

    value: Number


@dataclass(frozen=True, slots=True)
class Mean:
    """A metric that is a mean over units of its own: `sum_k units_k * value_k / sum_k units_k` over micro-batches.

    Args:
        value: A number, or a tensor with one: the mean of this micro-batch.
        units: The number that it divides by in this micro-batch; None for the units of the loss.

    Example:
        >>> loss = lambda model, x: (model(x).mean(), {"over zero": Mean(x[x > 0].mean(), units=(x > 0).sum())})
    """

    value: Number
    units: Number | None = None


@dataclass(frozen=True, slots=True)
class PerRow:
    """A metric with one entry per row, reported for the whole batch in the batch's own order of rows.

    Args:
        values: One entry per row of this micro-batch, rows first. Rows of a dropped micro-batch are reported as nan.

    Example:
        >>> loss = lambda model, x: (model(x).mean(), {"output": PerRow(model(x).sum(1))})
    """

    values: Tensor


Metric = Sum | Mean | PerRow | Number
"""A bare number is a mean over the units of the loss."""
Metrics = Mapping[str, Metric]


def combine(
    parts: Sequence[Metrics],
    units: Sequence[float],
    cut: MicroBatches | None = None,
    kept: Sequence[int] = (),
) -> dict[str, Tensor]:
    """Combine the metrics of micro-batches with these units into those of the whole batch.

    A mean over 0 units is nan. `parts` belong to the micro-batches `kept` of `cut`, which has the row numbers for `PerRow`;
    without it, rows are in the order of the parts.

    >>> combine([{"error": 0.5, "seen": Sum(2)}, {"error": 0.0, "seen": Sum(3)}], units=[2, 6])
    {'error': tensor(0.1250), 'seen': tensor(5.)}
    """
    combined = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        if any(isinstance(part.get(name), PerRow) for part in parts):
            combined[name] = _join_rows(name, parts, cut, kept)
        else:
            combined[name] = _combine_numbers(name, parts, units)
    return combined


def _join_rows(name: str, parts: Sequence[Metrics], cut: MicroBatches | None, kept: Sequence[int]) -> Tensor:
    """Join a `PerRow` metric into one tensor over all rows of the batch."""
    given = [(place, part[name]) for place, part in enumerate(parts) if name in part]
    values = [metric.values if isinstance(metric, PerRow) else torch.zeros(()) for _, metric in given]
    if cut is None:
        return torch.cat(values)
    row_numbers = cut.row_numbers
    num_rows = sum(map(len, row_numbers))
    places = [row_numbers[kept[place]] for place, _ in given]
    first = values[0]
    for rows, value in zip(places, values, strict=True):
        if value.shape[:1] != (len(rows),) or value.shape[1:] != first.shape[1:]:
            raise LossError(
                f"the metric {name!r} has shape {tuple(value.shape)} for a micro-batch of {len(rows)} rows and "
                f"{tuple(first.shape)} for another; PerRow takes one entry per row, all of one shape. Reduce what differs "
                "in length, for example to a mean over each row's own tokens."
            )
    is_complete = sum(map(len, places)) == num_rows
    dtype = first.dtype if is_complete or first.is_floating_point() else torch.float32
    whole = torch.full((num_rows, *first.shape[1:]), 0 if is_complete else torch.nan, dtype=dtype, device=first.device)
    numbers = tensor_on([row for rows in places for row in rows], whole.device)
    whole[numbers] = torch.cat(values).to(whole.dtype)
    return whole


def _combine_numbers(name: str, parts: Sequence[Metrics], units: Sequence[float]) -> Tensor:
    """Add the `Sum`s, or take the mean of the means weighted by their units."""
    values: list[Tensor] = []
    weights: list[Number] = []
    divisors: list[Number] = []
    for part, part_units in zip(parts, units, strict=True):
        if name not in part:
            continue
        given = part[name]
        assert not isinstance(given, PerRow)
        metric = given if isinstance(given, Sum | Mean) else Mean(given)
        values.append(_scalar(name, metric.value))
        if isinstance(metric, Sum):
            weights.append(1.0)
        else:
            weights.append(part_units if metric.units is None else metric.units)
            divisors.append(weights[-1])
    stacked = torch.stack(values)
    weighted = stacked * _stack(weights, stacked)
    # a mean over 0 units is nan: leave it out
    total = weighted.masked_fill(_stack(weights, stacked) == 0, 0).sum()
    return total / _stack(divisors, stacked).sum() if divisors else total


def _scalar(name: str, value: Number) -> Tensor:
    tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
    if tensor.numel() != 1:
        raise LossError(
            f"the metric {name!r} has shape {tuple(tensor.shape)}; expected one number. Return its mean, or Sum(its sum)."
        )
    if not tensor.is_floating_point():
        tensor = tensor.to(torch.float64 if tensor.device.type != "mps" else torch.float32)  # counts stay whole
    return at_least_fp32(tensor).reshape(())


def _stack(numbers: Sequence[Number], like: Tensor) -> Tensor:
    if not any(isinstance(number, Tensor) for number in numbers):
        return tensor_on([float(number) for number in numbers], like.device, like.dtype)
    tensors = [
        number if isinstance(number, Tensor) else tensor_on([number], like.device, like.dtype)[0] for number in numbers
    ]
    return torch.stack([tensor.to(like.device, like.dtype, non_blocking=True) for tensor in tensors])


def detached(metrics: Metrics) -> Metrics:
    """Detach every metric from its graph, which would keep the micro-batch's activations alive."""
    return {name: _detached(name, metric) for name, metric in metrics.items()}


def _detached(name: str, metric: Metric) -> Metric:
    if isinstance(metric, Tensor):
        return by_itself(metric)
    if isinstance(metric, PerRow):
        return PerRow(by_itself(metric.values))
    if isinstance(metric, Sum):
        return Sum(by_itself(metric.value) if isinstance(metric.value, Tensor) else metric.value)
    if isinstance(metric, Mean):
        value = by_itself(metric.value) if isinstance(metric.value, Tensor) else metric.value
        return Mean(value, by_itself(metric.units) if isinstance(metric.units, Tensor) else metric.units)
    if not isinstance(metric, int | float):
        raise LossError(
            f"the metric {name!r} is a {type(metric).__name__}: {metric!r:.60}; expected a number, a tensor of one, Sum(...), "
            "Mean(...) or PerRow(...)."
        )
    return metric


def by_itself(tensor: Tensor) -> Tensor:
    """Detach a tensor, and copy it if it is a view of a larger storage, as the result of `mse_loss` on the CPU is."""
    detached = tensor.detach()
    return detached.clone() if detached.untyped_storage().nbytes() > detached.nbytes else detached


def on_host(metrics: Metrics) -> Metrics:
    """Move metrics to the CPU, to be sent to other ranks."""
    return {name: _on_host(metric) for name, metric in metrics.items()}


def _on_host(metric: Metric) -> Metric:
    if isinstance(metric, Tensor):
        return metric.cpu()
    if isinstance(metric, PerRow):
        return PerRow(metric.values.cpu())
    if isinstance(metric, Sum):
        return Sum(torch.as_tensor(metric.value).cpu())
    if isinstance(metric, Mean):
        return Mean(torch.as_tensor(metric.value).cpu(), None if metric.units is None else float(metric.units))
    return metric
