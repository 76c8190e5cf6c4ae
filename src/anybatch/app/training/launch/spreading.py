"""A task's model spread over ranks, a copy on each (DDP) or a part on each (FSDP2); and what one rank finds out for all."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from anybatch.app.training.settings import Parallel
from anybatch.core import Ranks
from anybatch.errors import TaskError
from anybatch.parallel import reshard_all, wrapping_of


def spread_over_ranks(model: nn.Module, optimizer: Optimizer, kind: Parallel, group: Any) -> nn.Module:
    """The model to learn with, whose parameters the optimizer has then. What the task has spread itself stays as it is."""
    wrapping = wrapping_of(model)
    if wrapping.replicated or wrapping.sharded:
        return model
    device = next(model.parameters()).device
    if kind == "fsdp2":
        _shard(model, optimizer, device, group)
        return model
    return DistributedDataParallel(model, process_group=group, device_ids=None if device.type == "cpu" else [device])


def reshard(model: nn.Module) -> None:
    """Free what a forward pass without a backward pass has gathered of a sharded model."""
    reshard_all(wrapping_of(model).sharded)


def ranks_of_group(group: Any) -> Ranks:
    """The ranks of a process group; None is one process."""
    if group is None or dist.get_world_size(group) == 1:
        return Ranks()
    return Ranks(dist.get_rank(group), dist.get_world_size(group), group)


def _shard(model: nn.Module, optimizer: Optimizer, device: torch.device, group: Any) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    before = dict(model.named_parameters())
    mesh = DeviceMesh.from_group(group, device.type)
    try:
        for block in _blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    except ValueError as error:
        raise TaskError(f"--parallel fsdp2: {error} Or use --parallel ddp.") from error
    after = dict(model.named_parameters())
    sharded: dict[Tensor, nn.Parameter] = {parameter: after[name] for name, parameter in before.items()}
    for settings in optimizer.param_groups:
        settings["params"] = [sharded.get(parameter, parameter) for parameter in settings["params"]]
    for parameter in [parameter for parameter in optimizer.state if parameter in sharded]:
        optimizer.state[sharded[parameter]] = _sharded_state(optimizer.state.pop(parameter), sharded[parameter])


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of every list of layers, outermost: what is gathered at a time. All else is gathered with the model itself."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from dict.fromkeys(block for block in child if next(block.parameters(), None) is not None)
        else:
            yield from _blocks(child)


def _sharded_state(state: dict[str, Any], parameter: Any) -> dict[str, Any]:
    """What an optimizer knows of a parameter before its first step, as Adagrad does."""
    from torch.distributed.tensor import distribute_tensor

    return {
        name: distribute_tensor(value, parameter.device_mesh, parameter.placements)
        if isinstance(value, Tensor) and value.shape == parameter.shape
        else value
        for name, value in state.items()
    }


Value = TypeVar("Value")


def from_first_rank(make: Callable[[], Value], ranks: Ranks) -> Value:
    """Every rank gets what `make` returns on rank 0; an error that it raises there is raised on every rank.

    On the other ranks the exception has `is_told` set, because rank 0 alone needs to print it.
    """
    if ranks.size == 1:
        return make()
    raised: list[Exception] = []

    def attempt() -> tuple[Value | None, Exception | None]:
        try:
            return make(), None
        except Exception as error:
            raised.append(error)
            return None, error

    value, told = ranks.lend(attempt, 0)
    if raised:
        raise raised[0]
    if told is not None:
        told.is_told = True  # type: ignore[attr-defined]
        raise told
    return value  # type: ignore[return-value]
