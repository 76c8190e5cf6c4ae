"""Which schedule a batch takes: the one place that asks what kind of objective there is."""

from anybatch.norms import Layers
from anybatch.objectives import Coupled, Objective
from anybatch.passes.running import Running
from anybatch.passes.schedules.in_lockstep import EachLoss, InLockstep, JoinedLoss
from anybatch.passes.schedules.one_by_one import OneByOne
from anybatch.passes.schedules.two_passes import TwoPasses
from anybatch.passes.tools import Schedule
from anybatch.state import TensorFile


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
