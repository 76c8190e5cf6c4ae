"""How long a task's micro-batch takes, forward and backward: measured here, or from its FLOPs and a rate that is given."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from anybatch.batches import move
from anybatch.errors import SettingsError
from anybatch.objectives import checked_loss
from anybatch.passes import ForwardPass, autocast_context
from anybatch.projection import Pass
from anybatch.training.data import training_loader
from anybatch.training.experiment import Experiment


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """A pass, and where its seconds come from."""

    one_pass: Pass
    source: str
    """In words."""


def time_pass(experiment: Experiment, *, rows: int, flops: float | None = None, rounds: int = 5) -> PassTime:
    """Forward and backward of the task's first `rows` rows: the median of some rounds, or FLOPs / `flops` per second.

    Gradients are as large as the parameters that need them. The task's model is left as it was, but for random state and
    running statistics.
    """
    task, device = experiment.task, experiment.device
    batch = move(next(iter(training_loader(task, batch=rows, seed=0, epoch=1))), device)
    task.model.train()

    autocast = autocast_context(experiment.update.running.autocast, device)
    one_pass = ForwardPass(model=task.model, compute=task.whole_objective.loss, autocast=autocast)

    def forward() -> Tensor:
        return checked_loss(one_pass(batch))[0]

    counted = [_flops(forward), _flops(forward().backward)]
    if flops is not None:
        if not all(counted):
            raise SettingsError(
                f"--flops {flops:g}: this task's pass counts {counted[0]} and {counted[1]} FLOPs of matrix products and "
                "convolutions, too few to tell its time. Leave the option out to have it measured."
            )
        seconds, source = [count / flops for count in counted], f"{sum(counted):.3g} FLOPs at {flops:.3g} FLOP/s"
    else:
        seconds, source = _measured(forward, rounds), f"the median of {rounds} measured here, on {device}"
    task.model.zero_grad()
    parameters = list(task.model.parameters())
    return PassTime(
        one_pass=Pass(
            rows=rows,
            forward=seconds[0],
            backward=seconds[1],
            gradient_bytes=sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
            parameter_bytes=sum(parameter.nbytes for parameter in parameters),
        ),
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
    """The time when all that was asked of the device is done."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return perf_counter()
