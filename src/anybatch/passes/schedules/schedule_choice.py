"""Which schedule a batch takes: the one place that asks what kind of objective there is."""

from anybatch.noise import ONE_MICRO_BATCH
from anybatch.norms import Layers
from anybatch.objectives import Coupled, Objective
from anybatch.parallel import Engine
from anybatch.passes.batch_plan import BatchPlan
from anybatch.passes.running import Running
from anybatch.passes.schedules.in_lockstep import EachLoss, InLockstep, JoinedLoss
from anybatch.passes.schedules.one_by_one import OneByOne
from anybatch.passes.schedules.two_passes import TwoPasses
from anybatch.passes.tools import Schedule
from anybatch.state import TensorFile


def why_unmeasured(plan: BatchPlan, schedule: Schedule, engine: Engine) -> str:
    """Why the noise of this batch's gradient cannot be measured, in words, the same on every rank; empty where it can."""
    if schedule.hides_parts:
        return schedule.hides_parts
    if engine.is_even:
        return "a model sharded by fully_shard adds gradients up inside FSDP2, and no micro-batch's own is seen"
    return ONE_MICRO_BATCH if plan.num_micro_batches == 1 else ""


def schedule_for(
    objective: Objective | Coupled, layers: Layers, averaging: Layers, running: Running, file: TensorFile
) -> Schedule:
    """How to run a batch whose cut touches these BatchNorm and InstanceNorm layers. `file` is for what is kept on disk."""
    if running.batch_norm == "exact" and layers:
        finish = JoinedLoss(objective) if isinstance(objective, Coupled) else EachLoss(objective)
        return InLockstep(layers, finish, running.offload, file, averaging)
    if isinstance(objective, Coupled):
        return TwoPasses(objective)
    return OneByOne(objective, drops=running.drops)
