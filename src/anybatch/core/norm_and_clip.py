"""The norm of a model's gradient, and clipping by it; sparse and sharded gradients included."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from anybatch.core.torch_private import is_sharded, lower_each_, multiply_each_, norm_of_each, own_part, raise_each_


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The Euclidean norm of all gradients together, on the device; 0 where there are none.

    Of sharded gradients it is the norm of the whole, the same on every rank.
    """
    values = _values(parameters)
    sharded = [value for value in values if is_sharded(value)]
    if sharded:
        parts = [get_total_norm(sharded).full_tensor()]  # type: ignore[attr-defined]
        parts += [get_total_norm([value]) for value in values if not is_sharded(value)]
        whole: Tensor = torch.linalg.vector_norm(torch.stack(parts))
        return whole
    if len({(value.device, value.dtype) for value in values}) != 1:
        return get_total_norm(values)
    # what get_total_norm does for one device and dtype, without its grouping: half the time on a tiny model
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norm_of_each(values)))
    return norm


def clip_to_norm(parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale all gradients by `min(1, max_norm / (norm + 1e-6))`, as `clip_grad_norm_` does."""
    values = [own_part(value) for value in _values(parameters)]
    if values:
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        multiply_each_(values, coefficient.to(values[0].device))


def clip_to_value(parameters: Sequence[nn.Parameter], max_value: float) -> None:
    """Clamp every element of every gradient to [-max_value, max_value], as `clip_grad_value_` does."""
    values = [own_part(value) for value in _values(parameters)]
    if values:
        raise_each_(values, -max_value)
        lower_each_(values, max_value)


def _values(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The numbers of every gradient; a sparse one is coalesced first, so that its values share its memory."""
    values = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None and grad.is_sparse:
            grad = parameter.grad = grad.coalesce()
            grad = grad.values()
        if grad is not None:
            values.append(grad)
    return values
