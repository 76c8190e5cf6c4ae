"""Spread a model over ranks by DDP or FSDP2, seed them, and share the work of rank 0."""

import random
import sys
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
from anybatch.parallel import wrapping_of

Value = TypeVar("Value")


def spread_over_ranks(model: nn.Module, optimizer: Optimizer, kind: Parallel, group: Any) -> nn.Module:
    """Wrap the model, and give its new parameters to the optimizer. A model that the task has wrapped stays as it is."""
    wrapping = wrapping_of(model)
    if wrapping.replicated or wrapping.sharded:
        return model
    device = next(model.parameters()).device
    if kind == "fsdp2":
        return _shard(model, optimizer, device, group)
    return DistributedDataParallel(model, process_group=group, device_ids=None if device.type == "cpu" else [device])


def _shard(model: nn.Module, optimizer: Optimizer, device: torch.device, group: Any) -> nn.Module:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

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
        part: Any = sharded[parameter]  # optimizers such as Adagrad have a state before the first step
        optimizer.state[part] = {
            name: distribute_tensor(value, part.device_mesh, part.placements)
            if isinstance(value, Tensor) and value.shape == part.shape
            else value
            for name, value in optimizer.state.pop(parameter).items()
        }
    return model


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of every outermost `ModuleList`; each is sharded by itself."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from dict.fromkeys(block for block in child if next(block.parameters(), None) is not None)
        else:
            yield from _blocks(child)


def ranks_of_group(group: Any) -> Ranks:
    if group is None or dist.get_world_size(group) == 1:
        return Ranks()
    return Ranks(dist.get_rank(group), dist.get_world_size(group), group)


def seed_all(seed: int) -> None:
    """Seed torch on every device, Python, and NumPy if it is loaded."""
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def seed_rank(rank: int) -> None:
    """Seed everything from a draw of torch's state, which is the same on all ranks, and the rank."""
    drawn = int(torch.randint(2**62, ()))
    seed_all((drawn + rank * 1_000_003) % 2**63)


def from_first_rank(make: Callable[[], Value], ranks: Ranks) -> Value:
    """Call `make` on rank 0 and return its result, or raise its error, on every rank.

    On the other ranks the exception has `is_told` set, so that only rank 0 prints it.
    """
    if ranks.size == 1:
        return make()
    value: Any = None
    error: Exception | None = None
    if ranks.rank == 0:
        try:
            value = make()
        except Exception as raised:
            error = raised
    value, sent = ranks.lend(lambda: (value, error), 0)
    if sent is None:
        return value  # type: ignore[no-any-return]
    if error is None:
        sent.is_told = True  # type: ignore[attr-defined]
    raise error or sent
