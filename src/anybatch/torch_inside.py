"""Every private name of torch that anybatch uses, one alias or small function each.

Nothing here is promised by torch. `tests/test_torch_inside.py` has a test for each name, so that a new release of torch fails
with a list of names rather than with a symptom, and holds that no other module uses one. Where a release keeps what DDP or
FSDP2 need elsewhere, the model is refused by `check_ddp` and `check_fsdp`, before the first forward.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import get_annotations
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anybatch.errors import ParallelError

# ---------------------------------------------------------------------------------------------------------------- both


def _demand(thing: Any, *names: str, wrapper: str) -> None:
    """Refuse a release of torch in which `thing` has lost one of these names."""
    for name in names:
        if not _has(thing, name):
            kind = type(thing)
            raise ParallelError(
                f"torch {torch.__version__} has no {kind.__name__}.{name}, and without it anybatch cannot synchronise the "
                f"gradients of {wrapper} once per update. Install torch 2.13, or a newer anybatch."
            )


def _has(thing: Any, name: str) -> bool:
    """True of an attribute that is there, and of one that the class announces and sets later; properties are not called."""
    kind = type(thing)
    if hasattr(kind, name) or name in getattr(thing, "__dict__", ()):
        return True
    return any(name in get_annotations(base) for base in kind.__mro__)


# ----------------------------------------------------------------------------------------------------------------- DDP


def check_ddp(module: DistributedDataParallel) -> None:
    """Refuse a release of torch whose DDP lacks what we use of it."""
    wrapper = "DistributedDataParallel"
    _demand(module, "_comm_hooks", "_sync_buffers", "_active_ddp_module", "reducer", wrapper=wrapper)
    _demand(module, "will_sync_module_buffers", "require_forward_param_sync", wrapper=wrapper)
    _demand(module.reducer, "_rebuild_buckets", wrapper=wrapper)


def comm_hooks(module: DistributedDataParallel) -> list[Any]:
    """The user's hooks that DDP's reducer calls instead of its all-reduce."""
    return [hook for hook, _ in module._comm_hooks]


def sync_buffers_once(module: DistributedDataParallel) -> None:
    """Send rank 0's buffers to every rank, as DDP's first forward after an update does; later forwards do not."""
    if module.will_sync_module_buffers():
        module._sync_buffers()
    module.require_forward_param_sync = False


def sync_buffers_again(module: DistributedDataParallel) -> None:
    """Let DDP send rank 0's buffers with its next forward, as after a synchronised pass."""
    module.require_forward_param_sync = True


def end_reduction(module: DistributedDataParallel) -> None:
    """What DDP's next forward does first: it raises RuntimeError where the last reduction never ended."""
    module.reducer._rebuild_buckets()


@contextmanager
def active_ddp_put_back() -> Iterator[None]:
    """The block for forwards under way at the same time, each of which puts back the DDP module that the one before had set."""
    outside = DistributedDataParallel._active_ddp_module
    try:
        yield
    finally:
        DistributedDataParallel._active_ddp_module = outside  # else the class holds the model for ever, and its group


# --------------------------------------------------------------------------------------------------------------- FSDP2


class ShardedParameter(NamedTuple):
    """What `fully_shard` knows of one parameter before the first forward."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    sharded: Any
    """The DTensor of which every rank holds a part."""
    mesh: Any
    """The ranks that `fully_shard` was given."""
    policy: Any
    """The `MixedPrecisionPolicy` that `fully_shard` was given."""


def sharded_kind() -> type | None:
    """FSDP2's mark on a module; None where its package was never imported, so that no module can have it."""
    package = sys.modules.get("torch.distributed.fsdp")
    return None if package is None else package.FSDPModule


def check_fsdp(root: nn.Module) -> None:
    """Refuse a release of torch whose `fully_shard` lacks what we use of it."""
    wrapper = "fully_shard"
    for state in fsdp_states(root):
        _demand(state, "_fsdp_param_groups", "_modules", "_training_state", wrapper=wrapper)
        _demand(state, "_lazy_init", "_root_post_backward_final_callback", wrapper=wrapper)
        _training_state(state, "PRE_BACKWARD")
        _training_state(state, "IDLE")
        for group in state._fsdp_param_groups:
            _demand(group, "fsdp_params", "mesh_info", "reshard_after_backward", wrapper=wrapper)
            for parameter in group.fsdp_params:
                _demand(parameter, "sharded_param", "unsharded_param", "_unsharded_param", wrapper=wrapper)
                _demand(parameter, "unsharded_accumulated_grad", "reduce_dtype", "_orig_size", wrapper=wrapper)
                _policy(state, group, parameter)


def fsdp_state(module: Any) -> Any:
    """What `fully_shard` keeps for a module that it was called on."""
    _demand(module, "_get_fsdp_state", wrapper="fully_shard")
    return module._get_fsdp_state()


def fsdp_states(root: nn.Module) -> list[Any]:
    """What `fully_shard` keeps for a root, the first, and for every unit below it."""
    kind = sharded_kind()
    modules = [module for module in root.modules() if kind is not None and isinstance(module, kind)]
    return list(dict.fromkeys(fsdp_state(module) for module in modules))


def fsdp_groups(roots: Sequence[nn.Module]) -> list[Any]:
    """Every group of parameters that `fully_shard` gathers and reduces at once, in these roots and below."""
    return [group for root in roots for state in fsdp_states(root) for group in state._fsdp_param_groups]


def sharded_parameters(root: nn.Module) -> Iterator[ShardedParameter]:
    """Every parameter that `fully_shard` took, in a root and below."""
    for state in fsdp_states(root):
        for group in state._fsdp_param_groups:
            for parameter in group.fsdp_params:
                policy = _policy(state, group, parameter)
                yield ShardedParameter(
                    tuple(parameter._orig_size), parameter.sharded_param, group.mesh_info.mesh, policy
                )


def _policy(state: Any, group: Any, parameter: Any) -> Any:
    """torch 2.13 keeps the policy in all three, 2.15 no longer in the group."""
    for thing, name in ((parameter, "mp_policy"), (group, "mp_policy"), (state, "_mp_policy")):
        if hasattr(thing, name):
            return getattr(thing, name)
    _demand(state, "_mp_policy", wrapper="fully_shard")
    raise AssertionError


def flat_group(mesh: Any) -> Any:
    """The process group of all ranks of a mesh of several dimensions."""
    _demand(mesh, "_flatten", wrapper="fully_shard over a part of the ranks")
    return mesh._flatten().get_group()


@contextmanager
def resharding_put_back(roots: Sequence[nn.Module]) -> Iterator[None]:
    """The block in which `set_reshard_after_backward` may be called; each group has its own answer again after it."""
    before = [(group, group.reshard_after_backward) for group in fsdp_groups(roots)]
    try:
        yield
    finally:
        for group, reshard in before:
            group.reshard_after_backward = reshard


def gather_for_batch(root: Any) -> None:
    """Gather the whole parameters of a root and of all units below it, on every rank."""
    fsdp_state(root)._lazy_init()  # as its first forward would
    for state in fsdp_states(root):
        state._modules[0].unshard()


def gathered_parameters(roots: Sequence[nn.Module]) -> list[tuple[nn.Parameter, torch.dtype | None]]:
    """The whole parameters that lie on every rank, and the dtype in which each gradient is reduced; None for its own."""
    return [
        (parameter.unsharded_param, parameter.reduce_dtype)
        for group in fsdp_groups(roots)
        for parameter in group.fsdp_params
    ]


@contextmanager
def forwards_as_repeats(roots: Sequence[nn.Module]) -> Iterator[None]:
    """The block in which the hooks of `fully_shard` only cast inputs and outputs, and neither gather nor free parameters.

    They know one forward at a time: the second to leave a unit would free it. This state of theirs is meant for forwards that
    are repeated inside backward.
    """
    states = [state for root in roots for state in fsdp_states(root)]
    for state in states:
        state._training_state = _training_state(state, "PRE_BACKWARD")
    try:
        yield
    finally:
        for state in states:
            state._training_state = _training_state(state, "IDLE")


def reduce_gathered(root: Any) -> None:
    """Average over ranks what lies in the whole parameters' gradients, and free the parameters: the end of a backward pass."""
    fsdp_state(root)._root_post_backward_final_callback()


def forget_gathered_gradients(roots: Sequence[nn.Module]) -> None:
    """Drop the whole gradients that were added up and not yet reduced."""
    for group in fsdp_groups(roots):
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):  # gathered once, at least
                parameter._unsharded_param.grad = None


def _training_state(state: Any, name: str) -> Any:
    kind = type(state._training_state)
    _demand(state._training_state, name, wrapper="fully_shard")
    return kind[name]
