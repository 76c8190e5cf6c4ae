"""Precisions of a comparison: float64, and the model's own."""

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
    """Context manager that keeps all computation in float64.

    Models written for bf16 cast to fp32 (norms, rotary positions, softmax), and class weights belong to no model. Here casts
    go to float64, and tensors that meet a float64 tensor, or are summed, are raised to it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "").endswith("grouped_mm"):
            return _grouped_product(*args, **kwargs)
        if func in _CASTS:
            return Tensor.to(args[0], torch.float64, **kwargs)
        has_tensors = not _writes(func) and (
            getattr(func, "__name__", "") in _SUMS or _is_mixed([*args, *kwargs.values()])
        )
        args = [_raised(value, has_tensors) for value in args]
        kwargs = {key: _raised(value, has_tensors) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _raised(value: Any, has_tensors: bool) -> Any:
    """Return float64 for a lower dtype; with `has_tensors`, tensors in float64 too."""
    if isinstance(value, torch.dtype) and value in LOWER:
        return torch.float64
    if has_tensors and type(value) in (tuple, list):
        return type(value)(_raised(item, True) for item in value)
    return raised(value) if has_tensors and isinstance(value, Tensor) else value


def _is_mixed(values: list[Any]) -> bool:
    """True if the values contain tensors of float64 and of a lower precision."""
    tensors = [item for value in values for item in (value if isinstance(value, tuple | list) else (value,))]
    dtypes = {item.dtype for item in tensors if isinstance(item, Tensor)}
    return torch.float64 in dtypes and any(dtype in LOWER for dtype in dtypes)


def raised(tensor: Tensor) -> Tensor:
    """Return the tensor in float64, if its own precision is lower."""
    return tensor.double() if tensor.dtype in LOWER else tensor


def keep_in_backward(model: nn.Module) -> None:
    """Enable `HigherPrecision` in modules that backward runs again, because torch disables function modes in backward.

    A checkpointed block would otherwise run in fp32 the second time.
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
    """Multiply each group of rows, ending at `offs`, by its own matrix; torch has no float64 kernel for it."""
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
    """Return the dtype of autocast; None without autocast."""
    return autocast if isinstance(autocast, torch.dtype) else getattr(autocast, "fast_dtype", None)


def roundoff(tensors: Iterable[Tensor], autocast: torch.dtype | None) -> float:
    """Return the unit roundoff of the coarsest precision that a gradient passes through."""
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()} | ({autocast} if autocast else set())
    return max((torch.finfo(dtype).eps / 2 for dtype in dtypes), default=torch.finfo(torch.float32).eps / 2)


def why_not_float64(model: nn.Module) -> str | None:
    """Say why this model cannot run in float64; None if it may."""
    devices = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    if "mps" in devices:
        return "mps has no float64"
    strange = {parameter.dtype for parameter in model.parameters() if parameter.dtype not in (*LOWER, torch.float64)}
    return f"its parameters are {', '.join(sorted(map(str, strange)))}" if strange else None


def _writes(func: Any) -> bool:
    """True for functions that change a tensor in place; it keeps its dtype."""
    name = getattr(func, "__name__", "")
    is_method = name in ("__set__", "__setitem__") or name.startswith("__i")
    return is_method or (name.endswith("_") and not name.endswith("__"))
