"""Wrappers of a model for several ranks, and those that are refused."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anybatch.core import ALONE, LOW_PRECISION, Parallelism, Ranks, inside_compiled
from anybatch.errors import ParallelError
from anybatch.parallel.ddp import Replicated, ddp_name
from anybatch.parallel.fsdp import Sharded
from anybatch.parallel.torch_private_ddp import check_ddp
from anybatch.parallel.torch_private_fsdp import check_fsdp, flat_group, sharded_kind, sharded_parameters


def parallelism_for(model: nn.Module, *, reshard: bool) -> Parallelism:
    """Choose how the gradients of `model` are synchronised."""
    ranks = Ranks.of(model)
    wrapping = wrapping_of(model)
    if wrapping.sharded:
        return Sharded(wrapping.sharded, ranks, reshard)
    return Replicated(wrapping.replicated, ranks) if wrapping.replicated else ALONE


@dataclass(frozen=True, slots=True)
class Wrapping:
    """The parts of a model that torch synchronises over ranks: DDP modules or roots of `fully_shard`, not both."""

    replicated: tuple[DistributedDataParallel, ...] = ()
    sharded: tuple[Any, ...] = ()
    group: Any = None
    """The process group of all ranks that hold different rows."""


def wrapping_of(model: nn.Module) -> Wrapping:
    """Find the outermost DDP modules and FSDP2 roots in `model`."""
    modules = list(_outermost(model))
    if not modules:
        return Wrapping()
    replicated = tuple(module for module in modules if isinstance(module, DistributedDataParallel))
    sharded = tuple(module for module in modules if not isinstance(module, DistributedDataParallel))
    if replicated and sharded:
        raise ParallelError(
            f"{type(model).__name__} holds both DistributedDataParallel and fully_shard modules; wrap all of it in one way: "
            "fully_shard with a 2-D mesh replicates and shards."
        )
    for module in replicated:
        _check_replicated(module)
    for root in sharded:
        check_fsdp(root)
    groups = [module.process_group for module in replicated] or [_data_group(module) for module in sharded]
    members = [tuple(dist.get_process_group_ranks(group)) for group in groups]
    if len(set(members)) > 1:
        raise ParallelError(
            f"the parts of {type(model).__name__} are spread over different ranks ({members}); a batch "
            "has one set of ranks. Wrap all parts over the same process group or mesh."
        )
    for root in sharded:
        _check_sharded(root)
    return Wrapping(replicated, sharded, groups[0])


def peeled(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model, and the module inside each `torch.compile` and `DistributedDataParallel`, the innermost last."""
    inside: nn.Module | None = model
    while inside is not None:
        yield inside
        inside = inside.module if isinstance(inside, DistributedDataParallel) else inside_compiled(inside)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside `torch.compile` and `DistributedDataParallel`, as the user wrote it."""
    *_, innermost = peeled(model)
    return innermost


def unreplicated(model: nn.Module) -> nn.Module:
    """Return the outermost module that is not `DistributedDataParallel`; it may be compiled."""
    return next(module for module in peeled(model) if not isinstance(module, DistributedDataParallel))


def check_ranks(model: nn.Module, ranks: Ranks, num_expected: int) -> None:
    """Refuse a model that is not spread over all ranks of its framework."""
    if ranks.size != num_expected:
        raise ParallelError(
            f"{type(model).__name__} is spread over {ranks.size} of {num_expected} ranks, so that gradients would not meet. "
            "Let the framework wrap all of it in DistributedDataParallel, or shard all of it by fully_shard over one mesh of "
            "all ranks."
        )


def _outermost(model: nn.Module) -> Iterator[nn.Module]:
    """Yield wrapped modules that are in no other wrapped module."""
    if not dist.is_available() or not dist.is_initialized():
        return
    sharded = sharded_kind()
    if type(model).__name__ == "FullyShardedDataParallel":
        raise ParallelError(
            "this model is wrapped in FullyShardedDataParallel, which torch replaced by fully_shard (FSDP2). Shard it with "
            "torch.distributed.fsdp.fully_shard(model)."
        )
    if isinstance(model, DistributedDataParallel) or (sharded is not None and isinstance(model, sharded)):
        yield model
        return
    for child in model.children():
        yield from _outermost(child)


def _check_replicated(module: DistributedDataParallel) -> None:
    check_ddp(module)
    if module.static_graph:
        raise ParallelError(
            f"{ddp_name(module)} was made with static_graph=True, with which torch cannot leave a backward pass "
            "unsynchronised. Make it with static_graph=False; find_unused_parameters=True serves graphs that leave parameters "
            "out."
        )
    if module.mixed_precision is not None:
        raise ParallelError(
            f"{ddp_name(module)} was made with mixed_precision=, whose gradients are summed in low precision. Use autocast= of "
            "Update or Accumulator instead."
        )


def _data_group(root: nn.Module) -> Any:
    """Return the process group of all ranks with different rows: the whole mesh, 1-D (FSDP) or 2-D (HSDP)."""
    meshes = {mesh for _, _, mesh, _ in sharded_parameters(root)}
    if len(meshes) != 1:
        raise ParallelError(
            f"{type(root).__name__} is sharded over {len(meshes)} meshes; a batch has one set of ranks. Use one mesh."
        )
    mesh = meshes.pop()
    if mesh.ndim == 1:
        return mesh.get_group()
    return dist.group.WORLD if mesh.size() == dist.get_world_size() else flat_group(mesh)


def _check_sharded(root: nn.Module) -> None:
    for shape, sharded, mesh, policy in sharded_parameters(root):
        name = f"parameter of shape {shape} of {type(root).__name__}"
        if sharded.device_mesh.ndim != mesh.ndim:
            raise ParallelError(
                f"a {name} is cut by tensor parallelism too (mesh {sharded.device_mesh}), whose ranks share rows: this is not "
                "built. Use fully_shard over a mesh of data-parallel ranks alone."
            )
        computed = policy.param_dtype or sharded.dtype
        if computed in LOW_PRECISION and policy.reduce_dtype is not torch.float32:
            raise ParallelError(
                f"a {name} computes in {computed} and would be summed in it, over micro-batches and ranks. Give "
                "fully_shard mp_policy=MixedPrecisionPolicy(param_dtype=..., reduce_dtype=torch.float32)."
            )
