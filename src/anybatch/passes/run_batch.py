"""The engine: a plan in, its gradient in `.grad`, its result out; and the loop that starts again without what is not finite."""

from dataclasses import replace

from anybatch.passes.accumulated import Accumulated, result_of
from anybatch.passes.batch_plan import BatchPlan
from anybatch.passes.tools import Outcome, Schedule, Tools
from anybatch.state import NOTHING


def run(plan: BatchPlan, schedule: Schedule, tools: Tools) -> Accumulated:
    """Add to `.grad` what the batch's one backward pass would add. An exception leaves `.grad` as it was."""
    try:
        with tools.gradients:
            outcome = _passes(plan, schedule, tools)
            tools.barrier.hold(is_final=True)
            tools.sync.close(tools.gradients.parameters)
            result = result_of(plan, outcome, tools.ranks)
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
    tools.laps.finish()
    return result


def _passes(plan: BatchPlan, schedule: Schedule, tools: Tools) -> Outcome:
    """What the passes leave. Where one that is not finite spoils all, they run again without it: where rows look at each
    other, and where a loss has terms, each of which has to be divided by what is left of its units."""
    before = tools.finite.before_all() if schedule.layout.runs_all or plan.terms.each else NOTHING
    dropped: list[int] = []
    while plan.passes:
        outcome = schedule.run(plan, tools)
        if not outcome.spoilt:
            return replace(outcome, dropped=sorted(dropped)) if dropped else outcome
        before.put_back()
        tools.gradients.zero()
        dropped += outcome.spoilt
        plan = plan.without(outcome.spoilt)
    return Outcome(dropped=sorted(dropped))
