"""Replace the computation inside BatchNorm and InstanceNorm layers.

A layer's own `forward` runs as always. Only its call of `F.batch_norm` or `F.instance_norm` is replaced, so that subclasses,
momentum and counters keep working.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anybatch.core import BatchNormLayer, NormLayer

Layers = Mapping[str, NormLayer]
"""BatchNorm or InstanceNorm layers by their names in the model."""


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of a layer's call of `F.batch_norm`, with its names and defaults."""

    is_averaged: ClassVar[bool] = False
    """True if running statistics follow the mean over rows of each row's own statistics."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5

    @property
    def count(self) -> int:
        """Values per channel."""
        return self.input.numel() // max(self.input.shape[1], 1)

    def as_asked(self) -> Tensor:
        return self.with_running(self.running_mean, self.running_var, self.momentum)

    def with_running(self, mean: Tensor | None, var: Tensor | None, momentum: float) -> Tensor:
        """Make the call with other running statistics."""
        return F.batch_norm(self.input, mean, var, self.weight, self.bias, self.training, momentum, self.eps)


class InstanceCall(Call):
    """Arguments of `F.instance_norm`; `training` is `use_input_stats`. Each row has its own statistics."""

    is_averaged = True

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.input.shape[0]

    def with_running(self, mean: Tensor | None, var: Tensor | None, momentum: float) -> Tensor:
        return F.instance_norm(self.input, mean, var, self.weight, self.bias, self.training, momentum, self.eps)


Compute = Callable[[str, NormLayer, Call], Tensor]
_CALLS: Mapping[Any, type[Call]] = {F.batch_norm: Call, F.instance_norm: InstanceCall}


def batch_norms(model: nn.Module) -> dict[str, BatchNormLayer]:
    """Find the BatchNorm layers of the model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, BatchNormLayer)}


def uses_batch_statistics(layer: NormLayer) -> bool:
    """True if rows depend on each other: in training, or without running statistics."""
    return layer.training or (layer.running_mean is None and layer.running_var is None)


@contextmanager
def replaced(layers: Layers, compute: Compute) -> Iterator[None]:
    """Call `compute(name, layer, call)` instead of `F.batch_norm` in the forward of these layers."""
    with ExitStack() as stack:
        for name, layer in layers.items():
            # SyncBatchNorm's own forward would call collectives, and refuses the CPU
            own = partial(BatchNormLayer.forward, layer) if type(layer) is nn.SyncBatchNorm else layer.forward
            stack.enter_context(overridden(layer, "forward", partial(_forward, own, partial(compute, name, layer))))
        yield


@contextmanager
def overridden(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of one instance in this block."""
    before = {name: vars(owner)[name]} if name in vars(owner) else {}
    vars(owner)[name] = value
    try:
        yield
    finally:
        vars(owner).pop(name, None)
        vars(owner).update(before)


def _forward(own: Callable[..., Tensor], compute: Callable[[Call], Tensor], *args: Any, **kwargs: Any) -> Tensor:
    with _Intercept(compute):
        return own(*args, **kwargs)


class _Intercept(TorchFunctionMode):
    """Function mode that calls `compute` for `F.batch_norm` and `F.instance_norm` in training."""

    def __init__(self, compute: Callable[[Call], Tensor]) -> None:
        super().__init__()
        self._compute = compute

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CALLS:
            named = {"training" if name == "use_input_stats" else name: value for name, value in kwargs.items()}
            call = _CALLS[func](*args, **named)
            if call.training:
                return self._compute(call)
        return func(*args, **kwargs)
