"""Copies that take none of the memory that is short: from an accelerator to the host, from the CPU to disk."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from anybatch.state.disk import TensorFile


def kept_aside(tensor: Tensor, file: TensorFile) -> Callable[[], Tensor]:
    """What gives back a copy of `tensor` as it is now; tensors that hold no numbers are not copied."""
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return lambda: tensor
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        copy = tensor.clone()
        return lambda: copy
    if tensor.device.type != "cpu":
        host = tensor.to("cpu")
        return lambda: host
    dtype, shape = tensor.dtype, tensor.shape
    place = file.write(tensor.contiguous().flatten().view(torch.uint8))
    return lambda: file.read(*place).view(dtype).view(shape)
