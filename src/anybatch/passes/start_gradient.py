"""`StartGradient`: what backward passes start from. The only place of the engine that knows the loss scale."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.amp import GradScaler

from anybatch.passes.batch_plan import BatchPlan


@dataclass(frozen=True, slots=True)
class StartGradient:
    """share x ranks x loss scale, as the gradient of the loss: no multiplication in the graph, 15 % of a tiny step."""

    factor: float
    """What shares are multiplied by: the number of ranks, where gradients are averaged over them."""
    scaler: GradScaler | None

    def each(self, plan: BatchPlan, loss: Tensor) -> tuple[Tensor, ...]:
        """One for each pass, for losses like `loss`: computed in fp32 or better, and rounded once."""
        dtype = torch.float32 if loss.itemsize < 4 else loss.dtype
        weights = torch.tensor(plan.weights(self.factor), dtype=dtype, device=loss.device)
        return self._scaled(weights).to(loss.dtype).unbind()

    def whole(self, loss: Tensor) -> Tensor:
        """The one for a loss over all rows of all ranks."""
        return self._scaled(torch.full_like(loss, self.factor))

    def _scaled(self, weights: Tensor) -> Tensor:
        return weights if self.scaler is None else self.scaler.scale(weights)
