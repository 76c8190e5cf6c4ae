"""Precisions that a gradient is computed in: the model's own, and float64."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anybatch.batches import Batch, map_tensors

ComparedPrecision = Literal["float64", "own"]
LOWER = (torch.float32, torch.bfloat16, torch.float16)
_CASTS: Mapping[Any, Callable[..., Tensor]] = dict.fromkeys(
    (Tensor.float, Tensor.half, Tensor.bfloat16), lambda tensor, **options: Tensor.to(tensor, torch.float64, **options)
)


_SUMS = frozenset(("sum", "mean", "prod", "cumsum", "logsumexp", "nansum", "norm", "std", "var", "dot"))


class Float64(TorchFunctionMode):
    """Inside this block nothing falls below float64.

    Models cast to fp32 where they were written for bf16 (norms, rotary positions, softmax), and a criterion's class weights are
    in no model: casts go to float64 instead, and what meets a float64 tensor, or is summed, is raised to it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = _CASTS.get(func, func)
        args, kwargs = (
            [_raised_dtype(value) for value in args],
            {k: _raised_dtype(v) for k, v in (kwargs or {}).items()},
        )
        if not _writes(func) and (getattr(func, "__name__", "") in _SUMS or _meets_float64([*args, *kwargs.values()])):
            args, kwargs = [_raised(value) for value in args], {key: _raised(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def to_float64(batch: Batch) -> Batch:
    """The batch with its floating-point tensors in float64."""
    return map_tensors(batch, lambda tensor: tensor.double() if tensor.dtype in LOWER else tensor)


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


def _raised_dtype(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in LOWER else value


def _writes(func: Any) -> bool:
    """True of functions that change a tensor in place: it keeps its dtype."""
    name = getattr(func, "__name__", "")
    return (
        name in ("__set__", "__setitem__") or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    )


def _meets_float64(values: list[Any]) -> bool:
    tensors = [item for value in values for item in (value if isinstance(value, tuple | list) else (value,))]
    dtypes = {item.dtype for item in tensors if isinstance(item, Tensor)}
    return torch.float64 in dtypes and not dtypes.isdisjoint(LOWER)


def _raised(value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(_raised(item) for item in value)
    return value.to(torch.float64) if isinstance(value, Tensor) and value.dtype in LOWER else value
