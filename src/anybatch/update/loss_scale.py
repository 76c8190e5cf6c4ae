"""The loss scale in an update: unscaled once, stepped through, moved once; and none, for nothing."""

from dataclasses import dataclass
from typing import Protocol

from torch.amp import GradScaler
from torch.optim import Optimizer

from anybatch.errors import NonFiniteError

SMALLEST_SCALE = 2.0**-24
"""A loss scale below this has been halved some 36 times in a row: no overflow, but an inf or nan in the model itself."""


class LossScale(Protocol):
    """What an update does about the scale of its loss."""

    def unscale(self) -> None:
        """Make the gradients what they are without it."""

    def step(self) -> object:
        """Step the optimizer."""

    def update(self, *, is_applied: bool) -> None:
        """Move the scale, after an update that was applied, or overflowed."""

    def forget(self) -> None:
        """What was unscaled is not stepped: the next update unscales its own."""


@dataclass(frozen=True, slots=True)
class Unscaled:
    """There is no loss scale."""

    optimizer: Optimizer

    def unscale(self) -> None:
        pass

    def step(self) -> object:
        return self.optimizer.step()

    def update(self, *, is_applied: bool) -> None:
        pass

    def forget(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Scaled:
    """A `GradScaler` scales the loss."""

    scaler: GradScaler
    optimizer: Optimizer

    def unscale(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def step(self) -> object:
        return self.scaler.step(self.optimizer)

    def update(self, *, is_applied: bool) -> None:
        scaler = self.scaler
        if not is_applied:
            # of a sharded gradient, a rank looks at its own part and may have seen no overflow
            for found in scaler._found_inf_per_device(self.optimizer).values():
                found.fill_(1.0)
        scaler.update()
        if not is_applied and scaler.get_scale() < SMALLEST_SCALE:
            raise NonFiniteError(
                f"the loss scale has fallen to {scaler.get_scale():.3g} and the gradient is still not finite: this is no "
                "overflow, but an inf or nan in the data or the model. Run the batch without a scaler to see which "
                "parameter and micro-batch it comes from."
            )

    def forget(self) -> None:
        self.scaler._per_optimizer_states.pop(id(self.optimizer), None)


def loss_scale(scaler: GradScaler | None, optimizer: Optimizer) -> LossScale:
    """What an update with this scaler, or none, does."""
    return Unscaled(optimizer) if scaler is None else Scaled(scaler, optimizer)
