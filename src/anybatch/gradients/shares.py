"""The share of each micro-batch in the batch's loss: denominator first."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.amp import GradScaler


@dataclass(frozen=True, slots=True)
class Shares:
    """How much each micro-batch's loss weighs in its backward pass, and what is left to divide out at the close."""

    units: Sequence[float]
    """Of the micro-batches of this rank."""
    denominator: float
    """Shares are `units_k / denominator`."""
    reduction: str
    total: float
    """The units of the whole batch, of all ranks."""
    factor: float = 1.0
    """What shares are multiplied by: the number of ranks, where gradients are averaged over them."""
    is_borrowed: bool = False
    """True where the last micro-batch is another rank's, run with share 0 because this rank has nothing that counts."""

    @property
    def is_empty(self) -> bool:
        """True of a mean over 0 units, of all ranks: its gradient is zero."""
        return self.reduction == "mean" and self.total == 0

    @property
    def running(self) -> list[int]:
        """The micro-batches that run: a mean over 0 units has no gradient and may be nan, so it is left out.

        When all have 0 units the last one runs even so, for the zero gradients of the parameters that it touches.
        """
        if self.reduction == "sum" and not self.is_borrowed:
            return list(range(len(self.units)))
        return [index for index, units in enumerate(self.units) if units > 0] or [len(self.units) - 1]

    @property
    def left_out(self) -> list[int]:
        """The micro-batches of this rank that do not run."""
        running = set(self.running)
        return [index for index in range(self.num_own) if index not in running]

    @property
    def num_own(self) -> int:
        """The micro-batches of this rank's own rows."""
        return len(self.units) - self.is_borrowed

    @property
    def each(self) -> list[float]:
        """The weight of each micro-batch's loss."""
        if self.reduction == "sum":
            return [self.factor] * self.num_own + [0.0] * self.is_borrowed
        return [self.factor * units / (self.denominator or 1.0) for units in self.units]

    def units_of(self, counted: Sequence[int]) -> float:
        """The units of these micro-batches together."""
        return sum(self.units[index] for index in counted)

    def left_over(self, counted: float) -> float:
        """What the summed gradient is multiplied by at the close, when only `counted` units, of all ranks, went into it."""
        return 1.0 if self.reduction == "sum" or counted == 0 else self.denominator / counted

    def tensors(self, loss: Tensor, scaler: GradScaler | None) -> tuple[Tensor, ...]:
        """The shares as gradients to start the backward passes of losses like `loss` from."""
        dtype = torch.float32 if loss.itemsize < 4 else loss.dtype
        each = torch.tensor(self.each, dtype=dtype, device=loss.device)
        scaled = each if scaler is None else scaler.scale(each)
        return scaled.to(loss.dtype).unbind()


def shares_of(units: Sequence[float], reduction: str, *, underflows: bool = False) -> Shares:
    """Shares of the whole batch's units, so that nothing is left over at the close.

    Where gradients are fp16 and nothing scales the loss, such shares would underflow in backward (measured: 0.23 off at 64
    micro-batches). There the largest micro-batch has share 1, and the rest is divided out at the close.
    """
    total = sum(units)
    return Shares(units, max(units, default=0) if underflows else total, reduction, total)


def weighted_sum(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum_k weight_k * loss_k, in fp32 or better; 0 for no losses."""
    if not losses:
        return torch.zeros(())
    stacked = torch.stack(tuple(losses))
    if stacked.itemsize < 4:
        stacked = stacked.float()
    return stacked.dot(torch.tensor(weights, dtype=stacked.dtype, device=stacked.device))
