"""Running statistics of normalisation layers: what a forward changes, and what a skipped update must not."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


@dataclass(frozen=True, slots=True)
class RunningStatistics:
    """A copy of the running statistics of a model's layers, to put back when an update is not applied."""

    copies: tuple[tuple[Tensor, Tensor], ...]

    def restore(self) -> None:
        """Make the layers' statistics what they were when the copy was taken."""
        for buffer, copy in self.copies:
            buffer.copy_(copy)


def tracking_layers(model: nn.Module) -> list[nn.Module]:
    """BatchNorm and InstanceNorm layers that keep running statistics."""
    return [module for module in model.modules() if isinstance(module, _NormBase) and module.track_running_stats]


def copy_statistics(layers: list[nn.Module]) -> RunningStatistics:
    """The running statistics of `layers`, copied."""
    return RunningStatistics(tuple((buffer, buffer.clone()) for layer in layers for buffer in layer.buffers(False)))
