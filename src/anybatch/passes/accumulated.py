"""What a batch leaves behind, beside its gradient."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from anybatch.batches import Cut, MicroBatches
from anybatch.gradients import Shares, shares_of, weighted_sum
from anybatch.objectives import Metrics, PerRow, combine, detached
from anybatch.passes.over_ranks import Parts, over_ranks
from anybatch.passes.schedules import Together
from anybatch.passes.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulated:
    """What one batch left behind, beside its gradient. Reading a tensor waits for the device; nothing else does."""

    loss: Tensor
    """The loss of the whole batch, detached."""
    units: float
    """What the mean loss divided by: rows, target tokens, summed class weights."""
    micro_batches: int
    """How many micro-batches the batch was cut into."""
    metrics: Mapping[str, Tensor]
    """The objective's metrics, for the whole batch."""
    dropped: tuple[int, ...] = ()
    """Numbers of the micro-batches that were not finite and left out."""
    retries: int = 0
    """How often memory ran out and the batch was started again, in smaller micro-batches."""

    @property
    def has_gradient(self) -> bool:
        """False only where every micro-batch that counts was dropped."""
        return not self.dropped or self.units > 0


@dataclass(frozen=True, slots=True)
class Done:
    """What the micro-batches so far have left."""

    kept: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    metrics: list[Metrics] = field(default_factory=list)
    unweighted: dict[int, Metrics] = field(default_factory=dict)
    """Metrics of the micro-batches of no units."""

    @property
    def has_metrics(self) -> bool:
        return any(self.metrics)

    def add(self, index: int, loss: Tensor, metrics: Metrics, *, is_kept: bool) -> None:
        if not is_kept:
            self.dropped.append(index)
            return
        self.kept.append(index)
        self.losses.append(loss)
        self.metrics.append(detached(metrics))

    def result(self, work: Work, dtype: torch.dtype) -> Accumulated:
        shares = work.shares
        units = [shares.units[index] for index in self.kept]
        weights = shares_of(units, shares.reduction).each
        parts = Parts(
            metrics=[*self.metrics, *self.unweighted.values()],
            units=[*units, *[0.0] * len(self.unweighted)],
            indices=[*self.kept, *self.unweighted],
            dropped=self.dropped,
        )
        loss = _batch_loss(shares, self.losses, weights)
        if work.agreed is not None:
            whole = over_ranks(work, loss if self.losses else loss.to(dtype), parts)
            return Accumulated(micro_batches=sum(work.agreed.micro_batches), **whole)
        return Accumulated(
            loss=loss,
            units=sum(units),
            micro_batches=len(shares.units),
            metrics=combine(parts.metrics, parts.units, work.cut, parts.indices),
            dropped=tuple(self.dropped),
        )


def _batch_loss(shares: Shares, losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """0 for a batch of no units; nan where all that counts was dropped."""
    if shares.is_empty:
        return torch.zeros(())
    return weighted_sum(losses, weights) if losses else torch.tensor(torch.nan)


def result_together(together: Together, work: Work) -> Accumulated:
    """The result of a batch whose rows looked at each other."""
    weights = shares_of(together.units, work.shares.reduction).each
    loss = _batch_loss(work.shares, together.losses, weights)
    metrics = [detached(part) for part in together.metrics]
    num_micro_batches = len(work.micro_batches) if work.agreed is None else sum(work.agreed.micro_batches)
    if work.agreed is not None and together.counted is not None:
        num_own = sum(index < work.shares.num_own for index in together.counted)  # a borrowed one is the last
        parts = Parts(
            metrics=metrics[:num_own],
            units=together.units[:num_own],
            indices=together.counted[:num_own],
            dropped=(),
        )
        return Accumulated(micro_batches=num_micro_batches, **over_ranks(work, loss, parts))
    return Accumulated(
        loss=loss,
        units=sum(together.units),
        micro_batches=num_micro_batches,
        metrics=combine(metrics, together.units, *_rows_together(together, work)),
        dropped=tuple(together.dropped),
    )


def _rows_together(together: Together, work: Work) -> tuple[MicroBatches | None, Sequence[int]]:
    """Whose row is whose: by micro-batch, or for a loss that saw all rows joined, in the order they were joined."""
    cut = work.cut
    if together.counted is not None:
        return cut, together.counted
    has_rows = any(isinstance(metric, PerRow) for part in together.metrics for metric in part.values())
    if not has_rows or together.dropped or (cut.cut is None and work.agreed is None):
        return None, ()
    joined: list[int] = []
    for rows in work.ranks.gather_objects(cut.row_numbers):
        joined += [len(joined) + row for numbers in rows for row in numbers]
    return MicroBatches((cut,), Cut(rows=(tuple(joined),), lengths=(0,))), (0,)
