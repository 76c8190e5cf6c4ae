"""Private names of `fully_shard` that we use."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from anybatch.core import demand


def sharded_kind() -> type | None:
    """Return FSDP2's class of sharded modules; None if its package was never imported, so that there are none."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)


def check_fsdp(root: nn.Module) -> None:
    """Refuse a release of torch whose `fully_shard` lacks a name that we use."""
    wrapper = "fully_shard"
    for state in fsdp_states(root):
        demand(state, "_fsdp_param_groups", "_modules", "_training_state", "_lazy_init", wrapper=wrapper)
        demand(state, "_root_post_backward_final_callback", "_state_ctx", wrapper=wrapper)
        demand(state._training_state, "PRE_BACKWARD", "IDLE", wrapper=wrapper)
        for group in state._fsdp_param_groups:
            demand(group, "fsdp_params", "mesh_info", "reshard_after_backward", wrapper=wrapper)
            for taken in group.fsdp_params:
                demand(taken, "sharded_param", "unsharded_param", "_unsharded_param", wrapper=wrapper)
                demand(taken, "unsharded_accumulated_grad", "reduce_dtype", "_orig_size", "mp_policy", wrapper=wrapper)


def fsdp_state(module: Any) -> Any:
    demand(module, "_get_fsdp_state", wrapper="fully_shard")
    return module._get_fsdp_state()


def fsdp_states(root: nn.Module) -> list[Any]:
    """List the states of a root, which comes first, and of every unit below it."""
    kind = sharded_kind()
    modules = [module for module in root.modules() if kind is not None and isinstance(module, kind)]
    return list(dict.fromkeys(fsdp_state(module) for module in modules))


def fsdp_groups(roots: Sequence[nn.Module]) -> list[Any]:
    """List the groups of parameters that `fully_shard` gathers and reduces together, in these roots and below."""
    return [group for root in roots for state in fsdp_states(root) for group in state._fsdp_param_groups]


def sharded_parameters(root: nn.Module) -> Iterator[tuple[tuple[int, ...], Any, Any, Any]]:
    """Yield the unsharded shape, DTensor, mesh and precision policy of every sharded parameter."""
    for group in fsdp_groups([root]):
        for taken in group.fsdp_params:
            yield tuple(taken._orig_size), taken.sharded_param, group.mesh_info.mesh, taken.mp_policy


def flat_group(mesh: Any) -> Any:
    """Return the process group of all ranks of a mesh of several dimensions."""
    demand(mesh, "_flatten", wrapper="fully_shard over a part of the ranks")
    return mesh._flatten().get_group()


@contextmanager
def restoring_reshard(roots: Sequence[nn.Module]) -> Iterator[None]:
    """Restore each group's `reshard_after_backward` after the block."""
    before = [(group, group.reshard_after_backward) for group in fsdp_groups(roots)]
    try:
        yield
    finally:
        for group, reshard in before:
            group.reshard_after_backward = reshard


def gather_for_batch(root: Any) -> None:
    """Gather the parameters of a root and of all units below it, on every rank."""
    fsdp_state(root)._lazy_init()  # as its first forward would
    for state in fsdp_states(root):
        state._modules[0].unshard()


def gathered_parameters(roots: Sequence[nn.Module]) -> list[tuple[nn.Parameter, torch.dtype | None]]:
    """List (unsharded parameter, dtype in which its gradient is reduced; None for its own)."""
    return [(taken.unsharded_param, taken.reduce_dtype) for group in fsdp_groups(roots) for taken in group.fsdp_params]


def whole_parameters(root: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """List (shard, unsharded parameter) of all that were gathered before; the latter is the leaf in a forward's graph."""
    every = [taken for group in fsdp_groups([root]) for taken in group.fsdp_params]
    return [(taken.sharded_param, taken._unsharded_param) for taken in every if hasattr(taken, "_unsharded_param")]


@contextmanager
def forwards_as_repeats(roots: Sequence[nn.Module]) -> Iterator[None]:
    """Reduce the forward hooks of `fully_shard` to casts: of several forwards, the first to end would free a unit."""
    states = [state for root in roots for state in fsdp_states(root)]
    for state in states:
        state._training_state = type(state._training_state)["PRE_BACKWARD"]
    try:
        yield
    finally:
        for state in states:
            state._training_state = type(state._training_state)["IDLE"]


def reduce_gathered(root: Any) -> None:
    """Average the unsharded gradients over ranks and free the parameters, as at the end of a backward pass."""
    state = fsdp_state(root)
    context = state._state_ctx
    if hasattr(context, "manual_backward_finalization_active"):  # since torch 2.15 a backward pass sets it at its begin
        context.manual_backward_finalization_active = False
    state._root_post_backward_final_callback()


def forget_gathered_gradients(roots: Sequence[nn.Module]) -> None:
    """Drop the unsharded gradients that were accumulated and not yet reduced."""
    for group in fsdp_groups(roots):
        for parameter in group.fsdp_params:
            if not isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property):
                parameter.unsharded_accumulated_grad = (
                    None  # since torch 2.15 this is a property that reads the gradient below
                )
            if hasattr(parameter, "_unsharded_param"):  # gathered at least once
                parameter._unsharded_param.grad = None
