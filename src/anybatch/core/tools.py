"""What a schedule works with, and what it leaves."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from anybatch.core.barrier import Barrier
from anybatch.core.batch import sent
from anybatch.core.buffers import MovingBuffers
from anybatch.core.events import Accumulate, Backward
from anybatch.core.forward_pass import ForwardPass
from anybatch.core.gradients import GradientSum
from anybatch.core.hooks import PassHook
from anybatch.core.low_precision import number_in
from anybatch.core.metrics import Metrics, by_itself, detached
from anybatch.core.nesting import Batch, tensors
from anybatch.core.objective import PartLoss, part_loss
from anybatch.core.parallelism import Engine, Needs, Sync
from anybatch.core.plan import BatchPlan, Layout, Pass
from anybatch.core.ranks import Ranks
from anybatch.core.snapshot import Snapshot, of_statistics
from anybatch.core.telling import SILENT, Events


@dataclass(frozen=True, slots=True)
class StartGradient:
    """What backward passes start from: share x ranks x loss scale. The only place of the engine that knows the scale.

    It goes in as the gradient of the loss: no multiplication in the graph, which is 15 % of a tiny step.
    """

    factor: float
    """What shares are multiplied by: the number of ranks, where gradients are averaged over them."""
    scaler: GradScaler | None

    def each(self, plan: BatchPlan, loss: Tensor) -> tuple[Tensor, ...]:
        """One for each pass, for losses like `loss`: computed in fp32 or better, and rounded once."""
        dtype = torch.float32 if loss.itemsize < 4 else loss.dtype
        weights = sent(plan.weights(self.factor), loss.device, dtype)
        return self._scaled(weights).to(loss.dtype).unbind()

    def multiplier(self) -> float:
        """What every share is multiplied by. Reading the loss scale waits for the device."""
        return self.factor if self.scaler is None else self.factor * self.scaler.get_scale()

    def whole(self, loss: Tensor) -> Tensor:
        """The one for a loss over all rows of all ranks."""
        return self._scaled(torch.full_like(loss, self.factor))

    def _scaled(self, weights: Tensor) -> Tensor:
        return weights if self.scaler is None else self.scaler.scale(weights)


@dataclass(frozen=True, slots=True)
class Dropping:
    """Leaves micro-batches out that are not finite. Looking at one waits for the device."""

    model: nn.Module
    layers: Sequence[nn.Module]
    """Those that keep running statistics."""

    def accepts(self, value: Batch) -> bool:
        """True if every number in `value` is finite."""
        return all(number_in(tensor.isfinite().all()) for tensor in tensors(value))

    def before_pass(self) -> Snapshot:
        """Snapshot the running statistics, which a pass that is dropped must not have changed."""
        return of_statistics(self.layers)

    def before_all(self) -> Snapshot:
        """Snapshot all buffers, for passes that may have to run again without one of them."""
        return MovingBuffers([self.model]).snapshot()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one micro-batch left, or all of them together."""

    micro_batch: int | None
    """None of a loss that saw the rows of all micro-batches, on all ranks, at once."""
    units: float
    """What the loss averaged over."""
    loss: Tensor | None
    """Without its graph; None where there is none, because the mean is over nothing."""
    metrics: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the passes of a batch left beside its gradient."""

    parts: Sequence[Part] = ()
    dropped: Sequence[int] = ()
    """Micro-batches that were not finite, and have no part in the gradient."""
    spoilt: Sequence[int] = ()
    """Micro-batches that were not finite, and spoilt the others: all passes have to run again without them."""
    dtype: torch.dtype = field(default=torch.float32)
    """That of the losses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What a schedule works with, made once per attempt."""

    forward: ForwardPass
    gradients: GradientSum
    sync: Sync
    hooks: tuple[PassHook, ...]
    start: StartGradient
    events: Events
    dropping: Dropping | None
    """None where nobody looks at single micro-batches: what is not finite shows in the gradient."""
    barrier: Barrier
    ranks: Ranks
    is_even: bool = False
    """True where every pass is a collective, so that none can run on one rank alone."""

    def accepts(self, value: Batch) -> bool:
        """False of a value that is not finite, where micro-batches are dropped for that."""
        return self.dropping is None or self.dropping.accepts(value)

    def loss_of(self, plan: BatchPlan, one: Pass) -> PartLoss:
        """The loss of one pass, checked to be a single differentiable number, and its metrics."""
        index = one.micro_batch
        part = part_loss(self.forward(plan.cut[index], index), plan.place(index))
        self.events.end_loss(part.loss, micro_batch=index, units=part.units, share=one.share)
        return part

    def quiet_forward(self) -> ForwardPass:
        """The same forward, of which nobody is told."""
        return replace(self.forward, events=SILENT)

    def backward(
        self, roots: Tensor | Sequence[Tensor], starts: Tensor | Sequence[Tensor], micro_batch: int | None = None
    ) -> bool:
        """Add the gradient of `roots`; False where it was looked at and is not finite."""
        self.events.begin(Backward)
        is_finite = self.gradients.backward(roots, starts)
        self.events.end(Backward, micro_batch=micro_batch)
        self.events.begin(Accumulate)
        self.events.end(Accumulate, micro_batch=micro_batch, parameters=self.gradients.parameters)
        return is_finite


def part_of(index: int, units: float, loss: Tensor | None, metrics: Metrics) -> Part:
    """What micro-batch `index` left, without its graph, which would keep its activations alive."""
    return Part(
        micro_batch=index,
        units=units,
        loss=None if loss is None else by_itself(loss),
        metrics=detached(metrics) if metrics else metrics,
    )


class Schedule(Protocol):
    """How the passes of a batch become its gradient."""

    @property
    def layout(self) -> Layout:
        """Which micro-batches run, and in which order."""

    def compute(self, model: nn.Module, micro_batch: Batch) -> Any:
        """What a forward computes: a loss, or representations."""

    @property
    def hides_parts(self) -> str:
        """Why no micro-batch's own gradient is ever seen, in words; empty where each is."""

    def needs(self, engine: Engine) -> Needs:
        """What the synchronisation over ranks has to allow for."""

    def run(self, plan: BatchPlan, tools: Tools) -> Outcome:
        """Run the passes; after it the sum of their gradients is in `.grad`, on this rank."""
