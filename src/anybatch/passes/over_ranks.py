"""The result of a batch that several ranks ran: loss, units and metrics of all its rows, the same on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import torch
from torch import Tensor

from anybatch.batches import Cut, MicroBatches
from anybatch.objectives import Mean, Metric, Metrics, PerRow, Sum, combine
from anybatch.passes.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the micro-batches of one rank left beside their losses."""

    metrics: Sequence[Metrics]
    units: Sequence[float]
    indices: Sequence[int]
    """The micro-batch that each of `metrics` is of."""
    dropped: Sequence[int]


class Whole(TypedDict):
    """The part of a result that has to be gathered."""

    loss: Tensor
    units: float
    metrics: dict[str, Tensor]
    dropped: tuple[int, ...]


def over_ranks(work: Work, loss: Tensor, parts: Parts) -> Whole:
    """One small collective for loss and units; one more only if there are metrics, or micro-batches that were dropped.

    `PerRow` metrics have the rows of rank 0 first, then those of rank 1, and so on.
    """
    shares, ranks = work.shares, work.ranks
    units = sum(parts.units)
    is_mean = shares.reduction == "mean"
    has_loss = units > 0 if is_mean else shares.num_own > len(parts.dropped)
    own = float(loss) * (units if is_mean else 1.0) if has_loss else 0.0
    has_more = any(parts.metrics) or bool(parts.dropped)
    # reading the loss waits for the device, as the units of the next batch will
    totals = ranks.sum([units, own, float(has_more)])
    value = totals[1] if not is_mean else totals[1] / totals[0] if totals[0] else 0.0 if shares.is_empty else torch.nan
    metrics, dropped = _gathered(work, parts) if totals[2] else ({}, ())
    return Whole(
        loss=torch.tensor(value, dtype=loss.dtype, device=loss.device),
        units=totals[0],
        metrics=metrics,
        dropped=dropped,
    )


def _gathered(work: Work, parts: Parts) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    agreed = work.agreed
    assert agreed is not None
    held = [{name: on_host(metric) for name, metric in part.items()} for part in parts.metrics]
    rows = work.cut.row_numbers if any(isinstance(metric, PerRow) for part in held for metric in part.values()) else ()
    every = work.ranks.gather_objects((replace(parts, metrics=held), rows))
    metrics: list[Metrics] = []
    units: list[float] = []
    placed: list[tuple[int, ...]] = []
    dropped: list[int] = []
    kept: list[int] = []
    offset = 0
    for rank, (told, rows) in enumerate(every):
        kept += [len(placed) + index for index in told.indices]
        metrics += told.metrics
        units += told.units
        placed += [tuple(row + offset for row in numbers) for numbers in rows] or [()] * (
            1 + max(told.indices, default=0)
        )
        dropped += [agreed.number(rank, index) for index in told.dropped]
        offset += sum(map(len, rows))
    cut = MicroBatches((None,) * len(placed), Cut(rows=tuple(placed), lengths=(0,) * len(placed)))
    return combine(metrics, units, cut, kept), tuple(dropped)


def on_host(metric: Metric) -> Metric:
    """The same metric with its numbers on the CPU, to be sent."""
    if isinstance(metric, Tensor):
        return metric.cpu()
    if isinstance(metric, PerRow):
        return PerRow(metric.values.cpu())
    if isinstance(metric, Sum):
        return Sum(torch.as_tensor(metric.value).cpu())
    if isinstance(metric, Mean):
        return Mean(torch.as_tensor(metric.value).cpu(), None if metric.units is None else float(metric.units))
    return metric
