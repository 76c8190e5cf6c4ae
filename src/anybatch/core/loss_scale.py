"""The loss scale of an update that has a `GradScaler`."""

from dataclasses import dataclass

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from anybatch.core.out_of_memory import once_more
from anybatch.core.torch_private import forget_unscaling, overflows
from anybatch.errors import NonFiniteError

SMALLEST_SCALE = 2.0**-24
"""A loss scale below this has been halved some 36 times in a row: no overflow, but an inf or nan in the model itself."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """A `GradScaler` and the optimizer it unscales for: unscale once, step through it, move the scale once."""

    scaler: GradScaler
    optimizer: Optimizer

    def make(self, device: torch.device) -> None:
        """Make the scaler's tensors, which it makes at first use: all of them, or none."""
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
        """Divide the gradients by the scale."""
        self.scaler.unscale_(self.optimizer)

    def step(self) -> object:
        """Step the optimizer."""
        return self.scaler.step(self.optimizer)

    def update(self, *, is_applied: bool) -> None:
        """Move the scale after an update that was applied or overflowed."""
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
        """Let the next update unscale its own gradients, after one that was not stepped."""
        forget_unscaling(self.scaler, self.optimizer)
