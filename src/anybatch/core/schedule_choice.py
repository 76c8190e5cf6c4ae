"""Which schedule a batch takes: the one place that asks what kind of objective there is."""

from collections.abc import Mapping

from torch import nn

from anybatch.core.disk import TensorFile
from anybatch.core.objective import Coupled, Objective
from anybatch.core.options import Running
from anybatch.core.plugins import lockstep_schedule
from anybatch.core.schedules import OneByOne
from anybatch.core.tools import Schedule
from anybatch.core.two_passes import TwoPasses


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
