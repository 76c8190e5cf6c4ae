"""Losses whose rows look at each other, from micro-batches: representations first, then their gradient, then the encoder.

    representations of all micro-batches, without a graph  ->  loss over all rows  ->  its gradient by representation
    ->  every micro-batch forward again, with the random state of the first time, and backward from that gradient

This is the chain rule cut at the representations, so it is exact. The last micro-batch's graph is kept from the first pass:
one forward saved.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from anybatch.core.batch import join_rows
from anybatch.core.buffers import MovingBuffers
from anybatch.core.events import Loss
from anybatch.core.hooks import around
from anybatch.core.low_precision import at_least_fp32
from anybatch.core.metrics import Metrics, detached
from anybatch.core.nesting import Batch, map_tensors
from anybatch.core.objective import Coupled, checked_loss
from anybatch.core.parallelism import Engine, Needs
from anybatch.core.plan import BatchPlan, Layout, Pass
from anybatch.core.representations import (
    alone,
    check_graph,
    check_same_shapes,
    in_own_order,
    leaf,
    no_rows,
    roots_of,
    rows_of_all,
    share_out,
)
from anybatch.core.snapshot import Snapshot
from anybatch.core.tools import Outcome, Part, Tools
from anybatch.core.written_inputs import WriteWatch


@dataclass(slots=True)
class _Encoded:
    """One micro-batch between its two passes."""

    one: Pass
    before: Snapshot | None
    """Where its first pass started; None for the last one, which does not run again."""
    representations: Batch
    """With its graph for the last micro-batch, without for the others."""
    leaves: Batch = None
    """The same representations as the start of the loss's graph: their `.grad` is what the second pass starts from."""


@dataclass(frozen=True, slots=True)
class TwoPasses:
    """For a loss that sees all rows at once. A micro-batch that is not finite spoils the loss of all."""

    coupled: Coupled
    layout: ClassVar[Layout] = Layout(runs_all=True, repeats_first=True)  # the last one's graph is kept, and it counts

    hides_parts: ClassVar[str] = (
        "the loss is coupled: its rows look at each other, and no micro-batch has a gradient of its own"
    )

    def compute(self, model: nn.Module, micro_batch: Batch) -> Any:
        return self.coupled.encode(model, micro_batch)

    def needs(self, engine: Engine) -> Needs:
        return Needs(even_passes=engine.is_even, own_reduction="the gradient of a coupled loss")

    def run(self, plan: BatchPlan, tools: Tools) -> Outcome:
        buffers = MovingBuffers([tools.forward.model])
        buffers.snapshot()  # the first copies: an earlier moment than any that is put back
        with around([hook.around_batch() for hook in tools.hooks]):
            with around([hook.around_counted() for hook in tools.hooks]):
                encoded = [self._first(plan, one, buffers, tools) for one in plan.passes]
            spoilt = [each.one.micro_batch for each in encoded if not tools.accepts(each.representations)]
            if spoilt:
                return Outcome(spoilt=spoilt)
            loss, metrics, is_finite = self._loss(plan, encoded, tools)
            if not is_finite:
                return Outcome(spoilt=plan.micro_batches)
            after = buffers.snapshot()  # the first pass counts: what the second changes is put back
            spoilt = self._second(plan, encoded, buffers, tools)
            buffers.put_back(after)
        part = Part(micro_batch=None, units=plan.units_seen, loss=loss, metrics=detached(metrics))
        return Outcome(parts=[part], spoilt=spoilt, dtype=loss.dtype)

    def _first(self, plan: BatchPlan, one: Pass, buffers: MovingBuffers, tools: Tools) -> _Encoded:
        for hook in tools.hooks:
            hook.before_pass()
        before = None if one.is_last else buffers.snapshot()
        watch = WriteWatch.of(plan.cut[one.micro_batch])
        with torch.set_grad_enabled(one.is_last and torch.is_grad_enabled()), tools.sync.passing(is_last=False):
            representations = tools.forward(plan.cut[one.micro_batch], one.micro_batch)
        watch.check("a coupled loss runs every forward twice, the second time")
        for hook in () if one.reports else tools.hooks:
            hook.discard_pass()
        return _Encoded(one, before, representations if one.is_last else map_tensors(representations, alone))

    def _loss(self, plan: BatchPlan, encoded: list[_Encoded], tools: Tools) -> tuple[Tensor, Metrics, bool]:
        """The loss of all rows, detached, with its gradient left in the leaves; False where it is not finite."""
        check_graph(self.coupled, encoded[-1].representations)
        tools.events.begin(Loss)
        for each in encoded:
            each.leaves = map_tensors(each.representations, leaf)
        tools.barrier.hold()
        seen = join_rows([each.leaves if each.one.reports else no_rows(each.leaves) for each in encoded])
        loss, metrics = loss_of_all(self.coupled, in_own_order(plan, seen), tools)
        tools.events.end_loss(loss, micro_batch=None, units=sum(plan.units), share=1.0)
        if not tools.accepts(loss):
            return loss.detach(), metrics, False
        is_finite = tools.gradients.backward(loss, tools.start.whole(loss))
        share_out(tools.ranks, tools.gradients.parameters, [each.leaves for each in encoded])
        return loss.detach(), metrics, is_finite

    def _second(self, plan: BatchPlan, encoded: list[_Encoded], buffers: MovingBuffers, tools: Tools) -> list[int]:
        """Backward through every micro-batch, the last first, whose graph is there; those that were not finite."""
        last = encoded.pop()
        with tools.sync.passing(is_last=not encoded):
            spoilt = _backward(last, last.representations, tools)
        last.representations = last.leaves = None  # its graph must not live beside the next one
        for number, each in enumerate(encoded, start=1):
            assert each.before is not None
            buffers.put_back(each.before)
            index = each.one.micro_batch
            with tools.sync.passing(is_last=number == len(encoded)):
                spoilt += _backward(each, tools.forward(plan.cut[index], index), tools)
        return spoilt


def loss_of_all(coupled: Coupled, own: Batch, tools: Tools) -> tuple[Tensor, Metrics]:
    """The loss over this rank's rows and those of all others, in fp32 or better, and its metrics."""
    with tools.forward.autocast:
        loss, metrics = checked_loss(coupled.loss(rows_of_all(tools.ranks, own)))
    return at_least_fp32(loss), metrics


def _backward(encoded: _Encoded, again: Batch, tools: Tools) -> list[int]:
    check_same_shapes(encoded.one.micro_batch, encoded.leaves, again)
    roots, grads = roots_of(again, encoded.leaves)
    is_finite = not roots or tools.backward(roots, grads, encoded.one.micro_batch)
    return [] if is_finite else [encoded.one.micro_batch]
