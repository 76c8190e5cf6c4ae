"""Which schedule a batch takes: the one place that asks what kind of objective there is."""

from collections.abc import Mapping

from torch import nn

from anybatch.objectives import Coupled, Objective
from anybatch.passes.running import Running
from anybatch.passes.schedules.one_by_one import OneByOne
from anybatch.passes.schedules.two_passes import TwoPasses
from anybatch.passes.tools import Schedule
from anybatch.plugins import lockstep_schedule
from anybatch.state import TensorFile


def schedule_for(
    objective: Objective | Coupled,
    layers: Mapping[str, nn.Module],
    averaging: Mapping[str, nn.Module],
    running: Running,
    file: TensorFile,
) -> Schedule:
    """How to run a batch whose cut touches these BatchNorm and InstanceNorm layers. `file` is for what is kept on disk."""
    if running.batch_norm == "exact" and layers:
        return lockstep_schedule(objective, layers, averaging, running.offload, file)  # type: ignore[no-any-return]
    if isinstance(objective, Coupled):
        return TwoPasses(objective)
    return OneByOne(objective, drops=running.drops)
