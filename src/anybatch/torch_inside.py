"""Every private name of torch that anybatch uses, one alias or small function each.

torch promises none of them. `tests/test_torch_inside.py` has a test for each, so that a new release of torch fails with a list
of names, and no other module uses one. Where a release lacks what DDP or FSDP2 need, the model is refused at once.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import get_annotations
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id
from torch._C._autograd import _profiler_enabled
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp import GradScaler
from torch.autograd.graph import _engine_run_backward
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.optim import Optimizer
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

from anybatch.errors import ParallelError

__all__ = ["FakeTensor", "FakeTensorMode", "StorageWeakRef", "TorchDispatchMode"]  # under torch's own names
BatchNormLayer = _BatchNorm
"""What all BatchNorm layers are."""
InstanceNormLayer = _InstanceNorm
"""What all InstanceNorm layers are."""
SpectralNormWeight = _SpectralNorm
"""The parametrization that steps its power iteration in every forward."""
NormLayer = _NormBase
"""What all layers with running statistics are: BatchNorm and InstanceNorm."""
DropoutLayer = _DropoutNd
"""What all dropout layers are."""
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""The table of a module's children, to put another in the place of one."""
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
"""The table of a module's buffers, to put back the very tensor that was there."""
pre_hooks_of: Callable[[nn.Module], dict[int, Any]] = attrgetter("_forward_pre_hooks")
"""What a module calls before its forward: the old form of spectral norm among it."""
gradient_hooks_of: Callable[[Any], tuple[Any, Any]] = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
"""What backward calls with each gradient of a tensor, before and after it is added to `.grad`."""
STEPPED_IN_BACKWARD = "_in_backward_optimizers"
"""The attribute of parameters that torch's optimizer in backward steps."""
op_name: Callable[[Any], str] = attrgetter("_schema.name")
"""What a dispatch mode sees called, without its overload: "aten::bernoulli_"."""
num_writes: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor was written to in place."""
storage_key: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""What tells one living storage from another."""
without_dynamo = _disable_dynamo
"""A function that torch.compile must not look into."""
without_modes = _disable_current_modes
"""The block in which no dispatch mode of the user's sees what we do."""
function_modes: Callable[[], list[Any]] = _get_current_function_mode_stack
"""The function modes of this thread, outermost first, to enter them in another."""
dispatch_modes: Callable[[], list[Any]] = _get_current_dispatch_mode_stack
"""The dispatch modes of this thread, outermost first, to enter them in another."""
is_profiled: Callable[[], bool] = _profiler_enabled
"""True where a profiler of the user's is running, and wants names."""
run_engine: Callable[..., Any] = _engine_run_backward
"""What `torch.autograd.backward` does once it has compared shapes, which is 10 % of a tiny pass."""
multiply_each_ = torch._foreach_mul_
"""A list of tensors times a number, in place, in a few kernels."""
norm_of_each = torch._foreach_norm
"""The norm of each tensor of a list, in a few kernels."""
raise_each_ = torch._foreach_clamp_min_
"""A list of tensors, none of their numbers below a bound, in place."""
lower_each_ = torch._foreach_clamp_max_
"""A list of tensors, none of their numbers above a bound, in place."""
COPY_ELSEWHERE = torch.ops.aten._to_copy.default
"""The op that copies a tensor to another device."""
SAVED = "_saved_"
"""How the names begin under which a node of the graph keeps what its backward needs: "_saved_target"."""
outputs_of: Callable[[Any], list[Any]] = attrgetter("_input_metadata")
"""What a node of the graph computed, each with its shape."""
read_layout = torch.serialization._get_layout
"""What a pickled layout, such as `torch.strided`, is read with."""


def inside_compiled(model: nn.Module) -> nn.Module | None:
    """The module that `torch.compile(model)` wrapped; None of one that it did not."""
    return getattr(model, "_orig_mod", None)


def is_compiled_in_place(model: nn.Module) -> bool:
    """True after `model.compile()`, which wraps nothing."""
    return model._compiled_call_impl is not None


def is_in_backward() -> bool:
    """True in code that backward calls, such as a checkpointed block that is computed again."""
    return _current_graph_task_id() != -1


def is_dynamo_loaded() -> bool:
    """False where nothing can have been compiled."""
    return "torch._dynamo" in sys.modules


def storage_behind(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage that a weak reference points to; None where it is gone."""
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


def profiler_events(profiler: Any) -> list[Any]:
    """Every event of a finished profile, allocations with their bytes among them."""
    return list(profiler.profiler.kineto_results.events())


def overflows(scaler: GradScaler, optimizer: Optimizer) -> list[Tensor]:
    """What the scaler found of infinities in the gradients of this optimizer: a number on each device, to be written to."""
    return list(scaler._found_inf_per_device(optimizer).values())


def forget_unscaling(scaler: GradScaler, optimizer: Optimizer) -> None:
    """Let the scaler unscale the gradients of this optimizer anew, as after a step."""
    scaler._per_optimizer_states.pop(id(optimizer), None)


def _demand(thing: Any, *names: str, wrapper: str) -> None:
    """Refuse a release of torch in which `thing` has lost one of these names."""
    for name in names:
        if not _has(thing, name):
            raise _lacking(thing, name, wrapper)


def _lacking(thing: Any, name: str, wrapper: str) -> ParallelError:
    return ParallelError(
        f"torch {torch.__version__} has no {type(thing).__name__}.{name}, and without it anybatch cannot synchronise the "
        f"gradients of {wrapper} once per update. Install torch 2.13, or a newer anybatch."
    )


def _has(thing: Any, name: str) -> bool:
    """True of an attribute that is there, and of one that the class announces and sets later; properties are not called."""
    is_there = hasattr(type(thing), name) or name in getattr(thing, "__dict__", ())
    return is_there or any(name in get_annotations(base) for base in type(thing).__mro__)


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


def sharded_kind() -> type | None:
    """FSDP2's mark on a module; None where its package was never imported, so that no module can have it."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)


def check_fsdp(root: nn.Module) -> None:
    """Refuse a release of torch whose `fully_shard` lacks what we use of it."""
    wrapper = "fully_shard"
    for state in fsdp_states(root):
        _demand(state, "_fsdp_param_groups", "_modules", "_training_state", "_lazy_init", wrapper=wrapper)
        _demand(state, "_root_post_backward_final_callback", wrapper=wrapper)
        _demand(state._training_state, "PRE_BACKWARD", "IDLE", wrapper=wrapper)
        for group in state._fsdp_param_groups:
            _demand(group, "fsdp_params", "mesh_info", "reshard_after_backward", wrapper=wrapper)
            for taken in group.fsdp_params:
                _demand(taken, "sharded_param", "unsharded_param", "_unsharded_param", wrapper=wrapper)
                _demand(taken, "unsharded_accumulated_grad", "reduce_dtype", "_orig_size", wrapper=wrapper)
                _policy(state, group, taken)


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


def sharded_parameters(root: nn.Module) -> Iterator[tuple[tuple[int, ...], Any, Any, Any]]:
    """Of every parameter that `fully_shard` took: the shape of the whole, its DTensor, the mesh and the precision policy."""
    for state in fsdp_states(root):
        for group in state._fsdp_param_groups:
            for taken in group.fsdp_params:
                policy = _policy(state, group, taken)
                yield tuple(taken._orig_size), taken.sharded_param, group.mesh_info.mesh, policy


def _policy(state: Any, group: Any, parameter: Any) -> Any:
    """torch 2.13 keeps the policy in all three, 2.15 no longer in the group."""
    for thing, name in ((parameter, "mp_policy"), (group, "mp_policy"), (state, "_mp_policy")):
        if hasattr(thing, name):
            return getattr(thing, name)
    raise _lacking(state, "_mp_policy", "fully_shard")


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
    return [(taken.unsharded_param, taken.reduce_dtype) for group in fsdp_groups(roots) for taken in group.fsdp_params]


@contextmanager
def forwards_as_repeats(roots: Sequence[nn.Module]) -> Iterator[None]:
    """The block in which hooks of `fully_shard` only cast: they know one forward, and the second to end would free a unit."""
    states = [state for root in roots for state in fsdp_states(root)]
    for state in states:
        state._training_state = type(state._training_state)["PRE_BACKWARD"]
    try:
        yield
    finally:
        for state in states:
            state._training_state = type(state._training_state)["IDLE"]


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
