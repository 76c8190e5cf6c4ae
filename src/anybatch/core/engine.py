"""The engine: a plan in, its gradient in `.grad`, its result out; and the loop that starts again without what is not finite."""

from collections.abc import Callable
from dataclasses import replace

import torch

from anybatch.core.accumulated import Accumulated, result_of
from anybatch.core.batch_state import BatchState
from anybatch.core.buffers import MovingBuffers
from anybatch.core.nesting import map_tensors
from anybatch.core.objective import loss_and_metrics
from anybatch.core.plan import BatchPlan
from anybatch.core.snapshot import Snapshot
from anybatch.core.tools import Outcome, Schedule, Tools
from anybatch.core.written_inputs import WriteWatch


def run(plan: BatchPlan, schedule: Schedule, tools: Tools, look: Callable[[], None]) -> Accumulated:
    """Add to `.grad` what the batch's one backward pass would add. An exception leaves `.grad` as it was.

    `look()` is called after the passes, before anything of them is final.
    """
    try:
        with tools.gradients:
            outcome = _passes(plan, schedule, tools)
            look()
            tools.barrier.hold(is_final=True)
            tools.sync.close(tools.gradients.parameters)
            result = result_of(plan, outcome, tools)
            if not any(part.micro_batch is None for part in outcome.parts):  # a loss over all rows has no shares
                tools.gradients.scale = plan.left_over(result.units)
            if plan.is_empty:
                tools.gradients.zero()
    except BaseException as error:
        tools.sync.forget()
        if isinstance(error, Exception):
            tools.barrier.fail(error)
        raise
    finally:
        tools.events.close()
    for hook in tools.hooks:
        hook.finish()
    return result


def _passes(plan: BatchPlan, schedule: Schedule, tools: Tools) -> Outcome:
    """What the passes leave. Where one that is not finite spoils all, they run again without it: where rows look at each
    other, and where a loss has terms, each of which has to be divided by what is left of its units."""
    runs_again = schedule.layout.runs_all or bool(plan.terms.each)
    before = None if tools.dropping is None or not runs_again else tools.dropping.before_all()
    watch = WriteWatch.of(plan.cut) if schedule.layout.runs_all else None
    dropped: list[int] = []
    while plan.passes:
        outcome = schedule.run(plan, tools)
        if not outcome.spoilt:
            return replace(outcome, dropped=sorted(dropped)) if dropped else outcome
        if watch is not None:
            watch.check("the others would run again without a micro-batch that is not finite,")
        assert before is not None  # only where micro-batches are dropped is one found that spoils others
        before.put_back()
        tools.gradients.zero()
        dropped += outcome.spoilt
        plan = plan.without(outcome.spoilt)
    return Outcome(dropped=sorted(dropped))


def effect_on_loss(plan: BatchPlan, tools: Tools, state: BatchState, before: Snapshot) -> str:
    """What a batch left in buffers does to the loss of its first micro-batch, in words; none where this cannot be tried."""
    index = plan.passes[0].micro_batch
    after = MovingBuffers([tools.forward.model]).snapshot()

    def loss() -> float:
        rows = map_tensors(plan.cut[index], torch.clone)  # a forward may write into them
        return loss_and_metrics(tools.quiet_forward()(rows, index))[0].item()

    if tools.ranks.size > 1:
        return ""
    try:
        with torch.no_grad():
            moved = loss()
            state.put_back(replace(before, random=after.random))
            was = loss()
    except Exception:  # a loss that needs gradients, or representations, which are no loss
        return ""
    finally:
        after.put_back()
    return f" It moves the loss of the first micro-batch by {abs(moved - was) / (abs(was) or 1.0):.1e} of itself."
