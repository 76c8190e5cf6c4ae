"""Checks of a model and its objective, and the few facts about them that a batch needs."""

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import nn

from anybatch.core.hooks import NOTHING
from anybatch.core.objective import Coupled, Objective
from anybatch.core.option_types import Autocast
from anybatch.core.options import Running
from anybatch.core.parallelism import Engine
from anybatch.errors import LossError, ParallelError, UpdateError


def autocast_context(autocast: Autocast, device: torch.device | None) -> AbstractContextManager[object]:
    """The block in which a forward runs; without autocast, one that does nothing."""
    if isinstance(autocast, torch.dtype):
        return torch.autocast(device.type if device is not None else "cpu", dtype=autocast)
    return NOTHING if autocast is None else autocast


def common_device(parameters: Iterable[nn.Parameter]) -> torch.device | None:
    """The device that all parameters share, if they do."""
    devices = {parameter.device for parameter in parameters}
    return devices.pop() if len(devices) == 1 else None


def passes_fp16(parameters: Iterable[nn.Parameter], autocast: AbstractContextManager[object]) -> bool:
    """True where gradients pass through fp16, whose smallest number is 6e-8."""
    if isinstance(autocast, torch.autocast) and autocast.fast_dtype is torch.float16:
        return True
    return any(parameter.dtype is torch.float16 for parameter in parameters)


def check_model(model: nn.Module) -> None:
    """Refuse what is no module."""
    if not isinstance(model, nn.Module):
        raise UpdateError(f"model={model!r:.80} is a {type(model).__name__}; expected a torch.nn.Module.")


def check_learner(model: nn.Module, objective: Objective | Coupled) -> None:
    """Refuse what is no module, and what is no objective."""
    check_model(model)
    if not isinstance(objective, Objective | Coupled):
        raise LossError(
            f"objective={objective!r} is a {type(objective).__name__}; expected an Objective. Use "
            "supervised(criterion), huggingface(), Objective(loss, units) or Coupled(encode, loss)."
        )


def check_drops(running: Running, objective: Objective | Coupled, engine: Engine) -> None:
    """Refuse to leave single micro-batches out where no rank could tell which one it was."""
    if not running.drops:
        return
    if engine.is_even:
        raise ParallelError(
            "a model sharded by fully_shard cannot leave single micro-batches out: no rank has one's gradient alone. Use "
            "on_nonfinite='skip', which leaves the update out, or DistributedDataParallel."
        )
    looks_around = running.batch_norm == "exact" or isinstance(objective, Coupled) or bool(objective.terms)
    if looks_around and engine.ranks.size > 1:
        raise ParallelError(
            f"on {engine.ranks.size} ranks, micro-batches whose rows look at each other, or whose loss has terms with units of "
            "their own, are not left out one by one. "
            "Use on_nonfinite='skip', which leaves the update out."
        )
