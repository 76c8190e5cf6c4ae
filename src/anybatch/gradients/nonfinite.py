"""Finding where an inf or a nan came from, after the fact."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from anybatch.batches import Batch
from anybatch.gradients.accumulator import Accumulator
from anybatch.gradients.summing import GradientSum, all_finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """The first micro-batch whose loss or gradient is not finite, seen when each was run again alone."""

    micro_batch: int
    num_micro_batches: int
    loss: float
    parameter: str | None
    """The first parameter with a gradient that is not finite; None where the gradients are finite and the loss is not."""


def find_culprit(accumulator: Accumulator, batch: Batch, names: Mapping[nn.Parameter, str]) -> Culprit | None:
    """Run each micro-batch again, alone, until one is not finite; None if all are (a random draw, a sum that overflowed).

    `.grad` is left alone.
    """
    work = accumulator.prepare(batch)
    gradient_sum = GradientSum(names)
    with gradient_sum.undone(), accumulator.norms.alone():
        for index in work.shares.running:
            loss, _ = work.forward(index)
            loss.backward()
            bad = next((name for parameter, name in names.items() if not all_finite([parameter.grad])), None)
            if bad is not None or not bool(loss.isfinite()):
                return Culprit(
                    micro_batch=index,
                    num_micro_batches=len(work.micro_batches),
                    loss=loss.detach().item(),
                    parameter=bad,
                )
            gradient_sum.zero()
    return None
