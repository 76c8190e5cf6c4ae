"""Micro-batches one by one: forward, backward, and its graph is gone before the next begins."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from anybatch.core.autograd_graph import leaves_of
from anybatch.core.hooks import around
from anybatch.core.nesting import Batch
from anybatch.core.objective import Objective, loss_and_metrics
from anybatch.core.parallelism import Engine, Needs
from anybatch.core.plan import BatchPlan, Layout, Pass
from anybatch.core.tools import Outcome, Part, Tools, part_of


@dataclass(frozen=True, slots=True)
class OneByOne:
    """For rows that do not look at each other. `grad += sum_k (units_k / units) * d loss(micro_batch_k)`."""

    layout: ClassVar[Layout] = Layout()
    hides_parts: ClassVar[str] = ""
    objective: Objective
    drops: bool = False
    """Micro-batches that are not finite are left out, so none may be summed over ranks before it was looked at."""

    def compute(self, model: nn.Module, micro_batch: Batch) -> Any:
        return self.objective.loss(model, micro_batch)

    def needs(self, engine: Engine) -> Needs:
        reason = "dropping micro-batches that are not finite" if self.drops else None
        return Needs(even_passes=engine.is_even, own_reduction=reason)

    def run(self, plan: BatchPlan, tools: Tools) -> Outcome:
        parts: list[Part] = []
        dropped: list[int] = []
        starts: tuple[Tensor, ...] = ()
        has_metrics = False
        hooks = tools.hooks
        with around([hook.around_batch() for hook in hooks]), around([hook.around_counted() for hook in hooks]):
            for number, one in enumerate(plan.passes):
                if one.is_last and tools.sync.is_shared:
                    tools.barrier.hold(is_final=True)
                with tools.sync.passing(is_last=one.is_last):
                    part, is_kept, starts = _run_pass(plan, one, number, starts, tools)
                for hook in hooks:
                    hook.after_pass(one.micro_batch, is_kept=is_kept, reports=one.reports)
                has_metrics = has_metrics or bool(part.metrics)
                if one.reports and is_kept:
                    parts.append(part)
                elif one.reports:
                    dropped.append(one.micro_batch)
            if dropped and plan.terms.each:
                return Outcome(spoilt=dropped)
            parts += _left_out(plan, tools, has_metrics=has_metrics)
            if tools.is_even:
                tools.sync.give_zeros(plan, tools)
        return Outcome(parts=parts, dropped=dropped, dtype=starts[0].dtype)


def _run_pass(
    plan: BatchPlan, one: Pass, number: int, starts: tuple[Tensor, ...], tools: Tools
) -> tuple[Part, bool, tuple[Tensor, ...]]:
    """What one pass left, and False where it was dropped. Its graph dies here: the next forward must not find it alive."""
    before = None if tools.dropping is None else tools.dropping.before_pass()
    for hook in tools.hooks:
        hook.before_pass()
    root, loss, metrics, units = tools.loss_of(plan, one)
    starts = starts or tools.start.each(plan, loss)
    is_kept = tools.accepts(loss) and tools.backward(root, starts[number], one.micro_batch)
    if not is_kept and before is not None:
        before.put_back()
    for hook in tools.hooks if not is_kept or not one.reports else ():
        hook.discard_pass()
    return part_of(one.micro_batch, units, loss, metrics), is_kept, starts


def _left_out(plan: BatchPlan, tools: Tools, *, has_metrics: bool) -> list[Part]:
    """What micro-batches that have no units, and so no loss, leave all the same, as their rows in the whole batch do.

    They are in the statistics of BatchNorm, may have metrics to count, and give zeros to parameters that no other rows use.
    They run only where one of these asks for it. Where DDP synchronised the last pass, parameters are left alone, because ranks
    would no longer agree on which have a gradient; where passes are collectives, none runs here but for metrics, and a rank
    that has fewer than another runs what it ran last, which counts for nothing; zeros are `Sync.give_zeros`.
    """
    missing = plan.num_left_out - len(plan.left_out) if tools.is_even else 0
    if not plan.left_out and not missing:
        return []
    bare = [] if tools.sync.is_shared else [p for p in tools.gradients.parameters if p.grad is None]
    if not has_metrics and not bare and (tools.is_even or not any(hook.needs_all_rows for hook in tools.hooks)):
        return []
    parts = [_forward_alone(plan, index, tools, bare) for index in plan.left_out]
    for _ in range(missing):
        _forward_alone(plan, plan.passes[-1].micro_batch, tools, bare)
    return parts if has_metrics else []


def _forward_alone(plan: BatchPlan, index: int, tools: Tools, bare: list[nn.Parameter]) -> Part:
    """The metrics of a micro-batch without units. Parameters among `bare` that it uses get zeros: its loss may be nan."""
    for hook in tools.hooks:
        hook.before_pass()
    with tools.sync.looking(), torch.set_grad_enabled(bool(bare) and torch.is_grad_enabled()):
        loss, metrics = loss_and_metrics(tools.quiet_forward()(plan.cut[index], index))
        touched = {id(leaf) for leaf in leaves_of([loss])} if bare else ()
    for parameter in bare:
        if id(parameter) in touched and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)
    return part_of(index, plan.units[index], None, metrics)
