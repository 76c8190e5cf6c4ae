"""BatchNorm layers whose statistics are not those of the micro-batch that runs: pooled, merged or frozen.

A layer's own `forward` runs as always; only the call of `F.batch_norm` inside it is computed otherwise, for as long as the
block lasts. So subclasses, momentum and counters stay the layer's business.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

Layers = Mapping[str, _BatchNorm]
"""BatchNorm layers by their names in the model."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a layer asks of `F.batch_norm`, with its names and defaults."""

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
        """What the layer would have computed."""
        return self.with_running(self.running_mean, self.running_var, self.momentum)

    def with_running(self, mean: Tensor | None, var: Tensor | None, momentum: float) -> Tensor:
        """The same computation, with other running statistics to write to."""
        return F.batch_norm(self.input, mean, var, self.weight, self.bias, self.training, momentum, self.eps)


Compute = Callable[[str, _BatchNorm, Call], Tensor]


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Every BatchNorm layer of the model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}


def uses_batch_statistics(layer: _BatchNorm) -> bool:
    """True of a layer whose rows look at each other: in training, or without running statistics to use instead."""
    return layer.training or (layer.running_mean is None and layer.running_var is None)


@contextmanager
def replaced(layers: Layers, compute: Compute) -> Iterator[None]:
    """Inside this block, `compute(name, layer, call)` stands for `F.batch_norm` in the forward of these layers."""
    before: list[tuple[_BatchNorm, Any]] = []
    try:
        for name, layer in layers.items():
            before.append((layer, layer.__dict__.get("forward")))
            # SyncBatchNorm's own forward would talk to other ranks, and refuses the CPU
            own = partial(_BatchNorm.forward, layer) if type(layer) is nn.SyncBatchNorm else layer.forward
            layer.__dict__["forward"] = partial(_forward, own, partial(compute, name, layer))
        yield
    finally:
        for layer, forward in before:
            if forward is None:
                layer.__dict__.pop("forward", None)
            else:
                layer.__dict__["forward"] = forward


def _forward(own: Callable[..., Tensor], compute: Callable[[Call], Tensor], *args: Any, **kwargs: Any) -> Tensor:
    with _Intercept(compute):
        return own(*args, **kwargs)


class _Intercept(TorchFunctionMode):
    """Answers `F.batch_norm` in training by `compute`."""

    def __init__(self, compute: Callable[[Call], Tensor]) -> None:
        super().__init__()
        self._compute = compute

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            call = Call(*args, **(kwargs or {}))
            if call.training:
                return self._compute(call)
        return func(*args, **(kwargs or {}))
