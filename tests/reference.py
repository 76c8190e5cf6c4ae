"""The reference every exactness test compares with: the whole batch at once, in float64, on a copy."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core.batch import map_tensors


def doubled(batch: Any) -> Any:
    """The batch with its floating-point tensors in float64."""
    return map_tensors(batch, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def whole_batch_gradient(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Any) -> Tensor:
    """The gradient that one backward pass over the whole batch gives in float64, flattened."""
    twin = copy.deepcopy(model).double()
    for parameter in twin.parameters():
        parameter.grad = None
    loss(twin, doubled(batch)).backward()
    return gradient(twin.parameters())


def gradient(parameters: Iterable[nn.Parameter]) -> Tensor:
    """All gradients in one float64 vector, zeros where there are none."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return torch.cat([grad.detach().to_dense().double().flatten() for grad in grads])


def relative_error(model: nn.Module, reference: Tensor) -> float:
    """|g - g_ref| / |g_ref| of the gradient that the model holds."""
    return float((gradient(model.parameters()) - reference).norm() / reference.norm())


def mean_of_means(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], micro_batches: Iterable[Any]) -> None:
    """The common mistake: every micro-batch weighs the same, whatever it averaged over."""
    model.zero_grad()
    parts = list(micro_batches)
    for part in parts:
        (loss(model, part) / len(parts)).backward()
