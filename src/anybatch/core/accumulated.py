"""What a batch leaves behind, beside its gradient: of all its rows, the same on every rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from anybatch.core.display import one_line
from anybatch.core.metrics import Metrics, PerRow, combine, on_host
from anybatch.core.micro_batches import Cut, MicroBatches
from anybatch.core.notebook_html import facts_table, html_block
from anybatch.core.plan import BatchPlan
from anybatch.core.ranks import Ranks
from anybatch.core.shares import shares_of, weighted_sum
from anybatch.core.tools import Outcome, Part, Tools


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
    is_empty: bool = False
    """True of a mean over no units: there was nothing to learn, and the gradient is zeros."""

    __repr__ = one_line

    def _repr_html_(self) -> str:
        facts = {"loss": self.loss, "units": self.units, "micro_batches": self.micro_batches, **self.metrics}
        return html_block("The gradient of one batch is in .grad", facts_table(facts))

    @property
    def has_gradient(self) -> bool:
        """False only where every micro-batch that counts was dropped."""
        return not self.dropped or self.units > 0


def result_of(plan: BatchPlan, outcome: Outcome, tools: Tools) -> Accumulated:
    """The result of a batch, from what its passes left on this rank and on the others."""
    loss, ranks = _loss_of(plan, outcome), tools.ranks
    own = [hook.numbers(plan.cut, [part.units for part in outcome.parts]) for hook in tools.hooks]
    totals = list(chain.from_iterable(own))
    if all(part.micro_batch is None for part in outcome.parts) and outcome.parts:
        rows = _rows_of_all(plan, outcome, ranks)
        result = _result(plan, outcome, loss, rows, [0])
    elif ranks.size == 1:
        result = _result(plan, outcome, loss, plan.cut, [part.micro_batch or 0 for part in outcome.parts])
    else:
        result, totals = _over_ranks(plan, outcome, loss, ranks, totals)
    units, summed = result.units, iter(totals)
    for hook, numbers in zip(tools.hooks, own, strict=True):
        if numbers:
            sums = [next(summed) for _ in numbers]
            hook.receive(sums, units, lambda: plan.left_over(units) / tools.start.multiplier())
    return result


def _result(
    plan: BatchPlan, outcome: Outcome, loss: Tensor, rows: MicroBatches | None, kept: Sequence[int]
) -> Accumulated:
    units = [part.units for part in outcome.parts]
    return Accumulated(
        loss=loss,
        units=sum(units),
        micro_batches=plan.num_micro_batches,
        metrics=combine([part.metrics for part in outcome.parts], units, rows, kept),
        dropped=tuple(outcome.dropped),
        is_empty=plan.is_empty,
    )


def _loss_of(plan: BatchPlan, outcome: Outcome) -> Tensor:
    """The loss of this rank's rows: 0 for a batch of no units; nan where all that counts was dropped."""
    if plan.is_empty:
        return torch.zeros(())
    counted = [(part.loss, part.units) for part in outcome.parts if part.loss is not None]
    if not counted:
        return torch.tensor(torch.nan)
    return weighted_sum([loss for loss, _ in counted], shares_of([units for _, units in counted], plan.reduction))


def _rows_of_all(plan: BatchPlan, outcome: Outcome, ranks: Ranks) -> MicroBatches | None:
    """Whose row is whose for a loss that saw the rows of all ranks joined: those it saw, in order, then those it did not."""
    has_rows = any(isinstance(metric, PerRow) for part in outcome.parts for metric in part.metrics.values())
    if not has_rows or (ranks.size == 1 and not outcome.dropped):
        return None
    joined: list[int] = []
    unseen: list[int] = []
    offset = 0
    for rows in ranks.gather_objects(plan.cut.row_numbers):
        for index, numbers in enumerate(rows):
            (unseen if index in outcome.dropped else joined).extend(offset + row for row in numbers)
        offset += sum(map(len, rows))
    return MicroBatches((plan.cut, None), Cut(rows=(tuple(sorted(joined)), tuple(unseen)), lengths=(0, 0)))


def _over_ranks(
    plan: BatchPlan, outcome: Outcome, loss: Tensor, ranks: Ranks, more: list[float]
) -> tuple[Accumulated, list[float]]:
    """The result, and the numbers in `more`, summed over ranks.

    One small collective for loss, units and these; one more only if there are metrics, or micro-batches that were dropped.

    `PerRow` metrics have the rows of rank 0 first, then those of rank 1, and so on.
    """
    units = sum(part.units for part in outcome.parts)
    is_mean = plan.reduction == "mean"
    has_loss = units > 0 if is_mean else plan.num_own > len(outcome.dropped)
    own = float(loss) * (units if is_mean else 1.0) if has_loss else 0.0
    has_more = any(part.metrics for part in outcome.parts) or bool(outcome.dropped)
    # reading the loss waits for the device, as the units of the next batch will
    totals = ranks.sum([units, own, float(has_more), *more])
    value = totals[1]
    if is_mean:
        value = totals[1] / totals[0] if totals[0] else 0.0 if plan.is_empty else torch.nan
    metrics, dropped = _gathered(plan, outcome, ranks) if totals[2] else ({}, ())
    result = Accumulated(
        loss=torch.tensor(value, dtype=loss.dtype if has_loss else outcome.dtype, device=loss.device),
        units=totals[0],
        micro_batches=plan.num_micro_batches,
        metrics=metrics,
        dropped=dropped,
        is_empty=plan.is_empty,
    )
    return result, totals[3:]


def _gathered(plan: BatchPlan, outcome: Outcome, ranks: Ranks) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """The metrics of all ranks' micro-batches put together, and the numbers of all that were dropped."""
    held = [replace(part, loss=None, metrics=on_host(part.metrics)) for part in outcome.parts]
    has_rows = any(isinstance(metric, PerRow) for part in held for metric in part.metrics.values())
    every = ranks.gather_objects((held, outcome.dropped, plan.cut.row_numbers if has_rows else ()))
    parts: list[Part] = []
    placed: list[tuple[int, ...]] = []
    kept: list[int] = []
    dropped: list[int] = []
    offset = 0
    for rank, (told, left_out, rows) in enumerate(every):
        indices = [part.micro_batch or 0 for part in told]
        kept += [len(placed) + index for index in indices]
        parts += told
        placed += [tuple(row + offset for row in numbers) for numbers in rows] or [()] * (1 + max(indices, default=0))
        dropped += [plan.number(rank, index) for index in left_out]
        offset += sum(map(len, rows))
    cut = MicroBatches((None,) * len(placed), Cut(rows=tuple(placed), lengths=(0,) * len(placed)))
    metrics: list[Metrics] = [part.metrics for part in parts]
    return combine(metrics, [part.units for part in parts], cut, kept), tuple(dropped)
