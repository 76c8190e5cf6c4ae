"""Precisions that a gradient is computed in: the model's own, and float64."""

from collections.abc import Iterable
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anybatch.core import Autocast, function_mode_stack, is_in_backward

ComparedPrecision = Literal["float64", "own"]
LOWER = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)
_SUMS = frozenset(("sum", "mean", "prod", "cumsum", "logsumexp", "nansum", "norm", "std", "var", "dot"))


class HigherPrecision(TorchFunctionMode):
    """A block in which nothing falls below float64.

    Models cast to fp32 where they were written for bf16 (norms, rotary positions, softmax), and a criterion's class weights are
    in no model: casts go to float64 instead, and what meets a float64 tensor, or is summed, is raised to it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "").endswith("grouped_mm"):
            return _grouped_product(*args, **kwargs)
        if func in _CASTS:
            return Tensor.to(args[0], torch.float64, **kwargs)
        args, kwargs = [_dtype(value) for value in args], {key: _dtype(value) for key, value in kwargs.items()}
        if not _writes(func) and (getattr(func, "__name__", "") in _SUMS or _meets([*args, *kwargs.values()])):
            args, kwargs = [_value(value) for value in args], {key: _value(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _dtype(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in LOWER else value


def _meets(values: list[Any]) -> bool:
    """True if tensors of float64 and of a lower precision are given together."""
    tensors = [item for value in values for item in (value if isinstance(value, tuple | list) else (value,))]
    dtypes = {item.dtype for item in tensors if isinstance(item, Tensor)}
    return torch.float64 in dtypes and any(dtype in LOWER for dtype in dtypes)


def _value(value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(map(_value, value))
    return raised(value) if isinstance(value, Tensor) else value


def raised(tensor: Tensor) -> Tensor:
    """The tensor in float64, if its own precision is lower."""
    return tensor.double() if tensor.dtype in LOWER else tensor


def keep_in_backward(model: nn.Module) -> None:
    """Let modules of this model run in `HigherPrecision` where backward calls them: torch leaves function modes when it begins.

    A checkpointed block that is computed again would compute in fp32 there.
    """
    entered: list[tuple[nn.Module, ExitStack]] = []

    def enter(module: nn.Module, inputs: Any) -> None:
        if is_in_backward() and not any(isinstance(mode, HigherPrecision) for mode in function_mode_stack()):
            stack = ExitStack()
            stack.enter_context(HigherPrecision())
            entered.append((module, stack))

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        if entered and entered[-1][0] is module:
            entered.pop()[1].close()

    for module in model.modules():
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)


def _grouped_product(left: Tensor, right: Tensor, *, offs: Tensor | None = None, **options: Any) -> Tensor:
    """Product of each group of rows, ending at `offs`, with its own matrix, which torch has in fp32 and below only."""
    left, right = left.double(), right.double()
    if offs is None:
        return torch.bmm(left, right)
    stops = [0, *offs.tolist()]
    spans = [slice(start, stop) for start, stop in pairwise(stops)]
    if left.dim() == 2 and right.dim() == 2:
        return torch.stack([left[:, span] @ right[span] for span in spans])
    if left.dim() == 3:
        return torch.cat([left[number] @ right[:, span] for number, span in enumerate(spans)], dim=1)
    rest = left.new_zeros(len(left) - stops[-1], right.shape[2])
    return torch.cat([*(left[span] @ right[number] for number, span in enumerate(spans)), rest])


def autocast_dtype(autocast: Autocast) -> torch.dtype | None:
    """The dtype that autocast computes in; None without autocast."""
    return autocast if isinstance(autocast, torch.dtype) else getattr(autocast, "fast_dtype", None)


def roundoff(tensors: Iterable[Tensor], autocast: torch.dtype | None) -> float:
    """Half the distance from 1 to the next number, of the coarsest precision that a gradient passes through."""
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()} | ({autocast} if autocast else set())
    return max((torch.finfo(dtype).eps / 2 for dtype in dtypes), default=torch.finfo(torch.float32).eps / 2)


def why_not_float64(model: nn.Module) -> str | None:
    """Why this model has no float64 twin; None where it may have one."""
    devices = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    if "mps" in devices:
        return "mps has no float64"
    strange = {parameter.dtype for parameter in model.parameters() if parameter.dtype not in (*LOWER, torch.float64)}
    return f"its parameters are {', '.join(sorted(map(str, strange)))}" if strange else None


def _writes(func: Any) -> bool:
    """True of functions that change a tensor in place: it keeps its dtype."""
    name = getattr(func, "__name__", "")
    return (
        name in ("__set__", "__setitem__") or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    )
