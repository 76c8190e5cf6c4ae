"""Gradients of bf16 and fp16 parameters, handed to the optimizer in a dtype that it takes."""

from collections.abc import Iterable

from torch import nn, optim

from anybatch.core.low_precision import is_low

TAKE_FP32 = (
    optim.SGD,
    optim.Adagrad,
    optim.RMSprop,
    optim.Adafactor,
    optim.Adadelta,
    optim.Rprop,
    optim.ASGD,
    optim.Muon,
)
"""Their step promotes; Adam, AdamW, NAdam, RAdam, Adamax and all fused kernels refuse (torch 2.13)."""
REFUSED_WITH = ("fused", "centered")
"""Options with which they refuse too: RMSprop's mean of gradients is interpolated, which does not promote."""


def takes_fp32_gradients(optimizer: optim.Optimizer) -> bool:
    """True of optimizers known to take them; others get gradients in the parameter's own dtype, cast once."""
    is_refused = any(group.get(option) for group in optimizer.param_groups for option in REFUSED_WITH)
    return type(optimizer) in TAKE_FP32 and not is_refused


def cast_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Hand fp32 gradients of bf16 and fp16 parameters over in the parameter's dtype, rounded once."""
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None and grad.dtype != parameter.dtype and is_low(parameter):
            cast = grad.to(parameter.dtype)  # first, because memory may run out here
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = cast
