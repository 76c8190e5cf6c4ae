"""Finding where an inf or a nan came from, after the fact."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from anybatch.core.accumulator import Accumulator
from anybatch.core.batch import Batch
from anybatch.core.engine import Tools
from anybatch.core.gradients import GradientSum, all_finite
from anybatch.core.hooks import NOTHING
from anybatch.core.plan import BatchPlan, Pass
from anybatch.core.schedules import OneByOne


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """The first micro-batch whose loss or gradient is not finite, seen when each was run again alone."""

    micro_batch: int
    num_micro_batches: int
    loss: float
    parameter: str | None
    """The first parameter with a gradient that is not finite; None where the gradients are finite and the loss is not."""
    rank: int | None = None
    """Whose micro-batch it is; None in one process, and where the gradient of all ranks' micro-batches shows it alone."""

    def where(self) -> str:
        """What is not finite, and where it was first seen, in words."""
        what = "the loss" if self.parameter is None else f"the gradient of {self.parameter!r}"
        whose = "" if self.rank is None else f" of rank {self.rank}"
        return (
            f"{what} is not finite, first in micro-batch {self.micro_batch} of {self.num_micro_batches}{whose} "
            f"(counted from 0), whose loss is {self.loss:.6g}"
        )


def find_nonfinite(accumulator: Accumulator, batch: Batch, names: Mapping[nn.Parameter, str]) -> NonFinite | None:
    """Run each micro-batch again, alone, until one is not finite; None if all are (a random draw, a sum that overflowed).

    `.grad` is left alone. Ranks look together, and all get the same answer. A coupled loss is computed of the rows of each
    micro-batch by themselves.
    """
    plan, _, tools = accumulator.prepare(batch, given=OneByOne(accumulator.objective.whole()))
    gradients = GradientSum(names)
    # sharded gradients can be seen only when they are synchronised, by all ranks at once
    is_seen_together = accumulator.engine.is_even
    found: NonFinite | None = None
    with gradients.undone(), NOTHING if accumulator.norms is None else accumulator.norms.alone():
        for one in plan.passes:
            with tools.sync.passing(is_last=is_seen_together):
                loss, *_ = tools.loss_of(plan, one)
                loss.backward()
            if found is None and one.reports:
                found = _look(plan, one, tools, loss.detach().item(), names, is_seen_together=is_seen_together)
            if found is not None and not is_seen_together:
                break
            gradients.zero()
    tools.sync.forget()  # nothing of this is summed over ranks
    every = [one for one in tools.ranks.gather_objects(found) if one is not None]
    return min(every, key=lambda one: (one.micro_batch, one.rank is None)) if every else None


def _look(
    plan: BatchPlan,
    one: Pass,
    tools: Tools,
    loss: float,
    names: Mapping[nn.Parameter, str],
    *,
    is_seen_together: bool,
) -> NonFinite | None:
    bad = next((name for parameter, name in names.items() if not all_finite([parameter.grad])), None)
    if bad is None and math.isfinite(loss):
        return None
    is_known = tools.ranks.size > 1 and not (is_seen_together and math.isfinite(loss))
    return NonFinite(
        micro_batch=one.micro_batch,
        num_micro_batches=plan.num_own,
        loss=loss,
        parameter=bad,
        rank=tools.ranks.rank if is_known else None,
    )
