"""The loss scale in an update: unscaled once, stepped through, moved once; and none, for nothing."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from anybatch.errors import NonFiniteError
from anybatch.state import once_more
from anybatch.torch_inside import forget_unscaling, overflows

SMALLEST_SCALE = 2.0**-24
"""A loss scale below this has been halved some 36 times in a row: no overflow, but an inf or nan in the model itself."""


class LossScale(Protocol):
    """What an update does about the scale of its loss."""

    def make(self, device: torch.device) -> None:
        """Make what is made at first use: all of it, or nothing."""

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

    def make(self, device: torch.device) -> None:
        pass

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

    def make(self, device: torch.device) -> None:
        # a scaler whose scale is there and whose count of good steps is not would refuse to work for ever
        before = dict(vars(self.scaler))

        def first_use() -> None:
            try:
                self.scaler.scale(torch.zeros((), device=device))
            except BaseException:
                vars(self.scaler).update(before)
                raise

        once_more(first_use)

    def unscale(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def step(self) -> object:
        return self.scaler.step(self.optimizer)

    def update(self, *, is_applied: bool) -> None:
        scaler = self.scaler
        if not is_applied:
            # of a sharded gradient, a rank looks at its own part and may have seen no overflow
            for found in overflows(scaler, self.optimizer):
                found.fill_(1.0)
        once_more(scaler.update)
        if not is_applied and scaler.get_scale() < SMALLEST_SCALE:
            raise NonFiniteError(
                f"the loss scale has fallen to {scaler.get_scale():.3g} and the gradient is still not finite: this is no "
                "overflow, but an inf or nan in the data or the model. Run the batch without a scaler to see which "
                "parameter and micro-batch it comes from."
            )

    def forget(self) -> None:
        forget_unscaling(self.scaler, self.optimizer)


def loss_scale(scaler: GradScaler | None, optimizer: Optimizer) -> LossScale:
    """What an update with this scaler, or none, does."""
    return Unscaled(optimizer) if scaler is None else Scaled(scaler, optimizer)
