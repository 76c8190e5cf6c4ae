"""How long a micro-batch takes, forward and backward: measured here, or from its FLOPs and a rate that is given."""

import statistics
from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from anybatch.batches import Batch, num_rows
from anybatch.errors import SettingsError
from anybatch.objectives import Objective, checked_loss
from anybatch.options import Autocast
from anybatch.passes import ForwardPass, autocast_context
from anybatch.projection.network import PassSeconds


def time_pass(
    model: nn.Module,
    objective: Objective,
    batch: Batch,
    *,
    autocast: Autocast = None,
    flops: float | None = None,
    rounds: int = 5,
) -> PassSeconds:
    """Forward and backward of `batch`, which lies on the model's device: the median of some rounds, or FLOPs / `flops`.

    Gradients are as large as the parameters that need them. The model is left as it was, but for random state and running
    statistics, and has no gradients afterwards.
    """
    parameters = list(model.parameters())
    device = parameters[0].device
    one_pass = ForwardPass(model=model, compute=objective.loss, autocast=autocast_context(autocast, device))
    model.train()

    def forward() -> Tensor:
        return checked_loss(one_pass(batch))[0]

    counted = [_flops(forward), _flops(forward().backward)]
    if flops is None:
        seconds, source = _measured(forward, rounds), f"the median of {rounds} measured here, on {device}"
    elif all(counted):
        seconds, source = [count / flops for count in counted], f"{sum(counted):.3g} FLOPs at {flops:.3g} FLOP/s"
    else:
        raise SettingsError(
            f"--flops {flops:g}: this task's pass counts {counted[0]} and {counted[1]} FLOPs of matrix products and "
            "convolutions, too few to tell its time. Leave the option out to have it measured."
        )
    model.zero_grad()
    return PassSeconds(
        rows=num_rows(batch),
        forward=seconds[0],
        backward=seconds[1],
        gradient_bytes=sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
        parameter_bytes=sum(parameter.nbytes for parameter in parameters),
        source=source,
    )


def _flops(work: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


def _measured(forward: Callable[[], Tensor], rounds: int) -> list[float]:
    laps = []
    for _ in range(rounds):
        begin = _now()
        loss = forward()
        middle = _now()
        loss.backward()
        laps.append((middle - begin, _now() - middle))
    return [statistics.median(part) for part in zip(*laps, strict=True)]


def _now() -> float:
    """The time when the device has done all that was asked of it."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return perf_counter()
