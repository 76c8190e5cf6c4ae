"""Private names of torch that we use, one alias or small function each; those of DDP and FSDP are in `parallel`."""

import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from inspect import get_annotations
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id
from torch._C._autograd import _enable_record_function, _profiler_enabled
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp import GradScaler
from torch.autograd.graph import _engine_run_backward
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.optim import Optimizer
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

from anybatch.errors import ParallelError

__all__ = ["FakeTensor", "FakeTensorMode", "StorageWeakRef", "TorchDispatchMode"]  # under torch's own names
# Classes of layers
BatchNormLayer = _BatchNorm
InstanceNormLayer = _InstanceNorm
NormLayer = _NormBase  # BatchNorm and InstanceNorm: layers with running statistics
DropoutLayer = _DropoutNd
SpectralNormWeight = _SpectralNorm  # the parametrization that steps its power iteration in every forward

# Tables of a module, and of a tensor
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
pre_hooks_of: Callable[[nn.Module], dict[int, Any]] = attrgetter("_forward_pre_hooks")
call_hooks_of: Callable[[nn.Module], tuple[dict[int, Any], dict[int, Any]]] = attrgetter(
    "_forward_hooks", "_forward_pre_hooks"
)
gradient_hooks_of: Callable[[Any], tuple[Any, Any]] = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
STEPPED_IN_BACKWARD = "_in_backward_optimizers"
"""Attribute of parameters that torch's optimizer in backward steps."""
storage_cdata: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Address of a storage, unique among live ones."""

# Dispatch, compilation and profiling
op_name: Callable[[Any], str] = attrgetter("_schema.name")
"""Name of an op in a dispatch mode, without its overload: "aten::bernoulli_"."""
TO_COPY = torch.ops.aten._to_copy.default
"""Op that copies a tensor to another device."""
disable_dynamo = _disable_dynamo
disable_current_modes = _disable_current_modes
function_mode_stack: Callable[[], list[Any]] = _get_current_function_mode_stack
dispatch_mode_stack: Callable[[], list[Any]] = _get_current_dispatch_mode_stack
profiler_enabled: Callable[[], bool] = _profiler_enabled
clear_fake_cache: Callable[[], None] = FakeTensorMode.cache_clear
"""Clears the cache of fake tensors for the whole process: a megabyte for each plan."""
get_layout = torch.serialization._get_layout
"""Reads a pickled layout, such as `torch.strided`."""

# Autograd, and ops on lists of tensors
engine_run_backward: Callable[..., Any] = _engine_run_backward
"""`torch.autograd.backward` without its comparison of shapes, which is 10 % of a tiny pass."""
SAVED = "_saved_"
"""Prefix of the attributes in which a node of the graph saves tensors for backward: "_saved_target"."""
outputs_of: Callable[[Any], list[Any]] = attrgetter("_input_metadata")
"""Outputs of a node of the graph, each with its shape."""
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_clamp_min_ = torch._foreach_clamp_min_
foreach_clamp_max_ = torch._foreach_clamp_max_


def version_of(tensor: Tensor) -> int:
    """Return the number of in-place writes to a tensor; 0 for inference tensors, which do not count them."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def inside_compiled(model: nn.Module) -> nn.Module | None:
    """Return the module that `torch.compile(model)` wrapped; None if `model` is not such a wrapper."""
    return getattr(model, "_orig_mod", None)


def is_compiled_in_place(model: nn.Module) -> bool:
    """Return True after `model.compile()`."""
    return model._compiled_call_impl is not None


def is_in_backward() -> bool:
    """Return True in code that backward calls, such as a checkpointed block that is recomputed."""
    return _current_graph_task_id() != -1


def is_dynamo_loaded() -> bool:
    return "torch._dynamo" in sys.modules


def storage_behind(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """Return the storage that a weak reference points to; None if it was freed."""
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


def profiler_events(profiler: Any) -> list[Any]:
    """List every event of a finished profile, including allocations."""
    return list(profiler.profiler.kineto_results.events())


@contextmanager
def without_op_names() -> Iterator[None]:
    """Let a running profiler record only allocations: names of ops take more memory than the ops do."""
    _enable_record_function(False)
    try:
        yield
    finally:
        _enable_record_function(True)


def overflows(scaler: GradScaler, optimizer: Optimizer) -> list[Tensor]:
    """Return the scaler's found-inf flags of this optimizer, one writable tensor per device."""
    return list(scaler._found_inf_per_device(optimizer).values())


def forget_unscaling(scaler: GradScaler, optimizer: Optimizer) -> None:
    """Reset the scaler's record that this optimizer was unscaled, as a step does."""
    scaler._per_optimizer_states.pop(id(optimizer), None)


def is_sharded(tensor: Tensor) -> bool:
    """Return True for a DTensor."""
    return hasattr(tensor, "device_mesh")


def own_part(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor, without a copy; any other tensor as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[no-any-return]


NEWEST = (2, 15)
"""Newest release that the tests were run with; see docs/versions.md."""


def warn_of_newer(version: str = torch.__version__) -> None:
    """Warn if torch is newer than the tested releases, because any name in this module may have changed.

    >>> warn_of_newer("2.15.1+cpu")
    """
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) > NEWEST:
        warnings.warn(
            f"torch {version} is newer than {NEWEST[0]}.{NEWEST[1]}, the newest that this anybatch was run with. It uses names "
            "that torch does not promise: run its tests, or anybatch verify, or install a newer anybatch.",
            RuntimeWarning,
            stacklevel=2,
        )


def demand(thing: Any, *names: str, wrapper: str) -> None:
    """Raise `ParallelError` if `thing` lacks one of these names in this release of torch."""
    for name in names:
        if not _has(thing, name):
            raise ParallelError(
                f"torch {torch.__version__} has no {type(thing).__name__}.{name}, and without it anybatch cannot synchronise "
                f"the gradients of {wrapper} once per update. Install torch 2.13 to 2.15, or a newer anybatch."
            )


def _has(thing: Any, name: str) -> bool:
    """Return True if the attribute exists, or the class annotates it. Does not call properties."""
    is_there = hasattr(type(thing), name) or name in getattr(thing, "__dict__", ())
    return is_there or any(name in get_annotations(base) for base in type(thing).__mro__)


LOW_PRECISION = (torch.bfloat16, torch.float16)


def is_low(value: object) -> bool:
    """Return True for a bf16 or fp16 tensor.

    >>> is_low(torch.zeros(1, dtype=torch.bfloat16)), is_low(torch.zeros(1))
    (True, False)
    """
    return isinstance(value, Tensor) and value.dtype in LOW_PRECISION


def number_in(value: Tensor) -> float:
    """Return the number in a tensor; 1 for a fake tensor, which `plan` runs on."""
    return 1.0 if isinstance(value, FakeTensor) else value.item()


def at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.itemsize < 4 else tensor


def leaves_of(roots: Iterable[Tensor], *, beyond: Collection[Any] = ()) -> Iterator[Tensor]:
    """Yield every leaf that gets a gradient from `roots`, once, without walking past the nodes `beyond`.

    Does not see into blocks under reentrant checkpointing, whose graph exists only during backward.
    """
    nodes = []
    for root in roots:
        if root.grad_fn is not None:
            nodes.append(_node_of(root))
        elif root.requires_grad:
            yield root
    yield from (node.variable for node in _nodes(nodes, beyond) if type(node).__name__ == "AccumulateGrad")


def nodes_named(root: Tensor, prefix: str) -> Iterator[Any]:
    """Yield the graph nodes of `root` with a name that begins with `prefix`."""
    return (node for node in _nodes([_node_of(root)], ()) if type(node).__name__.startswith(prefix))


def places_behind(root: Tensor, nodes: Sequence[Any]) -> list[int]:
    """Return the indices of the `nodes` that a backward pass from `root` reaches."""
    reached = set(_nodes([_node_of(root)], ()))
    return [place for place, node in enumerate(nodes) if node in reached]


def _node_of(root: Tensor) -> Any:
    """Return the node that made `root`, skipping the node that DDP puts behind all outputs of a module."""
    node = root.grad_fn
    if type(node).__name__ != "_DDPSinkBackward":
        return node
    assert node is not None
    return node.next_functions[root.output_nr][0]


def _nodes(start: Iterable[Any], beyond: Collection[Any]) -> Iterator[Any]:
    waiting = [node for node in start if node is not None]
    seen = set(beyond)  # keeps references: torch makes a new Python object for a node without one
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(earlier for earlier, _ in node.next_functions if earlier is not None)


warn_of_newer()
