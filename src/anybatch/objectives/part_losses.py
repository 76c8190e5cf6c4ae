"""The loss of one micro-batch in its batch: one number, several with units of their own, or one whose units were seen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from anybatch.batches import Batch
from anybatch.objectives.metrics import Mean, Metrics
from anybatch.objectives.objective import Units, checked_loss


class PartLoss(NamedTuple):
    """The loss of one micro-batch, as its batch has it."""

    root: Tensor
    """What backward starts from, with the micro-batch's share."""
    loss: Tensor
    """What is reported: the mean over `units`."""
    metrics: Metrics
    units: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TermPlace:
    """What a micro-batch is in its batch, counted before the first forward."""

    units: float
    total: float
    """The units of all micro-batches that count, of all ranks."""
    terms: Sequence[float] = ()
    """The units of each term of its loss."""
    totals: Sequence[float] = ()
    """Those of the whole batch."""


class Divided(Protocol):
    """What a loss function returns when one mean over units known ahead is not all."""

    def of_whole(self) -> tuple[Tensor, Metrics]:
        """The loss where these are all rows that there are."""

    def of_part(self, place: TermPlace) -> PartLoss:
        """The loss where these rows are a part of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TermLosses:
    """Several mean losses of the same rows, each with units of its own.

    `loss = sum_t weight_t * mean_t`, and the mean of a batch is that over the batch's units of the term:

        mean_t = sum_k units_tk * mean_tk / sum_k units_tk
    """

    losses: Mapping[str, Tensor]
    weights: Mapping[str, float]
    units: Mapping[str, Units | None]
    metrics: Metrics
    batch: Batch

    def of_whole(self) -> tuple[Tensor, Metrics]:
        counts = {name: None if units is None else units(self.batch) for name, units in self.units.items()}
        told = {name: Mean(loss, 1.0 if counts[name] is None else counts[name]) for name, loss in self.losses.items()}
        return _summed(self.losses, self.weights), told | dict(self.metrics)

    def of_part(self, place: TermPlace) -> PartLoss:
        """The share of these rows in each term, divided by the share that the micro-batch has, which backward starts from."""
        factors, told = {}, {}
        for name, own, total in zip(self.losses, place.terms, place.totals, strict=True):
            told[name] = Mean(self.losses[name], own)
            if own > 0:  # a mean over nothing is nan, and so may its gradient be: it has no part in the graph
                factors[name] = self.weights[name] * (own / total) * (place.total / place.units)
        counted = {name: self.losses[name] for name in factors}
        # rows that count for nothing run for the other ranks' sake: with a graph, and from a gradient of zero
        root = _summed(counted, factors) if counted else _summed(self.losses, self.weights)
        root, _ = checked_loss(root)
        return PartLoss(root, root, told | dict(self.metrics), place.units)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenLoss:
    """A mean loss, and what it was seen to divide by while it ran."""

    loss: Tensor
    units: float
    metrics: Metrics

    def of_whole(self) -> tuple[Tensor, Metrics]:
        return self.loss, self.metrics

    def of_part(self, place: TermPlace) -> PartLoss:
        """Weighed by what was seen in place of what was counted; the sum of it all is divided out at the close."""
        loss, metrics = checked_loss(self.loss)
        told = loss if self.units > 0 else torch.zeros_like(loss)
        loss = loss if self.units > 0 else loss.nan_to_num()  # a mean over nothing is nan, and would spoil all others
        return PartLoss(loss * (self.units / (place.units or 1.0)), told, metrics or self.metrics, self.units)


def part_loss(returned: Any, place: TermPlace) -> PartLoss:
    """What a loss function returned for rows that are a part of a batch."""
    if isinstance(returned, TermLosses | SeenLoss):
        return returned.of_part(place)
    loss, metrics = checked_loss(returned)
    return PartLoss(loss, loss, metrics, place.units)


def _summed(losses: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    terms = [loss * weights[name] if weights[name] != 1.0 else loss for name, loss in losses.items()]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
