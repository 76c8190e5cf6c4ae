"""Precisions that a gradient is computed in: the model's own, and finer ones, float64 and fp32."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anybatch.torch_inside import function_modes, is_in_backward

ComparedPrecision = Literal["float64", "float32", "own"]
LOWER = (torch.float32, torch.bfloat16, torch.float16)
_CASTS: Mapping[Any, torch.dtype] = {
    Tensor.float: torch.float32,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
}
_RAISED: Mapping[ComparedPrecision, torch.dtype | None] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "own": None,
}
_SUMS = frozenset(("sum", "mean", "prod", "cumsum", "logsumexp", "nansum", "norm", "std", "var", "dot"))


def raised_dtype(precision: ComparedPrecision) -> torch.dtype | None:
    """What a precision raises numbers to; None where they stay what they are."""
    return _RAISED[precision]


def is_below(dtype: torch.dtype, raised: torch.dtype | None) -> bool:
    """True of a dtype that is raised."""
    return raised is not None and dtype in LOWER and dtype.itemsize < raised.itemsize


class Raised(TorchFunctionMode):
    """Inside this block nothing falls below float64, or whichever precision is given.

    Models cast to fp32 where they were written for bf16 (norms, rotary positions, softmax), and a criterion's class weights are
    in no model: casts go to float64 instead, and what meets a float64 tensor, or is summed, is raised to it.
    """

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._dtype is torch.float64 and getattr(func, "__name__", "").endswith("grouped_mm"):
            return _grouped_product(*args, **kwargs)
        if func in _CASTS and is_below(_CASTS[func], self._dtype):
            return Tensor.to(args[0], self._dtype, **kwargs)
        args, kwargs = [self._in_words(value) for value in args], {k: self._in_words(v) for k, v in kwargs.items()}
        if not _writes(func) and (getattr(func, "__name__", "") in _SUMS or self._meets([*args, *kwargs.values()])):
            args, kwargs = [self._value(value) for value in args], {k: self._value(v) for k, v in kwargs.items()}
        return func(*args, **kwargs)

    def _in_words(self, value: Any) -> Any:
        """A dtype that is asked for."""
        return self._dtype if isinstance(value, torch.dtype) and is_below(value, self._dtype) else value

    def _meets(self, values: list[Any]) -> bool:
        tensors = [item for value in values for item in (value if isinstance(value, tuple | list) else (value,))]
        dtypes = {item.dtype for item in tensors if isinstance(item, Tensor)}
        return self._dtype in dtypes and any(is_below(dtype, self._dtype) for dtype in dtypes)

    def _value(self, value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(self._value(item) for item in value)
        return raised(value, self._dtype) if isinstance(value, Tensor) else value


def raised(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The tensor in that precision, where its own is below it."""
    return tensor.to(dtype) if is_below(tensor.dtype, dtype) else tensor


def keep_in_backward(model: nn.Module, dtype: torch.dtype) -> None:
    """Let modules of this model run in `Raised` where backward calls them: torch leaves function modes when it begins.

    A checkpointed block that is computed again would compute in fp32 there.
    """
    entered: list[tuple[nn.Module, ExitStack]] = []

    def enter(module: nn.Module, inputs: Any) -> None:
        if is_in_backward() and not any(isinstance(mode, Raised) for mode in function_modes()):
            stack = ExitStack()
            stack.enter_context(Raised(dtype))
            entered.append((module, stack))

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        if entered and entered[-1][0] is module:
            entered.pop()[1].close()

    for module in model.modules():
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)


def _grouped_product(left: Tensor, right: Tensor, *, offs: Tensor | None = None, **options: Any) -> Tensor:
    """What torch computes in fp32 and less only: the product of each group of rows, ending at `offs`, with its own matrix."""
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


def roundoff(tensors: Iterable[Tensor], autocast: torch.dtype | None) -> float:
    """Half the distance from 1 to the next number, of the coarsest precision that a gradient passes through."""
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()} | ({autocast} if autocast else set())
    return max((torch.finfo(dtype).eps / 2 for dtype in dtypes), default=torch.finfo(torch.float32).eps / 2)


def why_not_float64(model: nn.Module) -> str | None:
    """Why this model has no float64 twin; None where it may have one."""
    devices = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    return "mps has no float64" if "mps" in devices else why_not_raised(model)


def why_not_raised(model: nn.Module) -> str | None:
    """Why the parameters of this model have no finer precision; None where they have."""
    strange = {parameter.dtype for parameter in model.parameters() if parameter.dtype not in (*LOWER, torch.float64)}
    return f"its parameters are {', '.join(sorted(map(str, strange)))}" if strange else None


def _writes(func: Any) -> bool:
    """True of functions that change a tensor in place: it keeps its dtype."""
    name = getattr(func, "__name__", "")
    return (
        name in ("__set__", "__setitem__") or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    )
