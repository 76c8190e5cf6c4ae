"""Copies that take none of the memory that is short: from an accelerator to the host, from the CPU to disk."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from anybatch.core.disk import TensorFile
from anybatch.core.torch_private import FakeTensor


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


MOST_PIECES, SMALLEST_PIECE = 64, 2**11


def pieces_of(numel: int) -> Iterator[slice]:
    """Slices of so many numbers: 64 at most, of 2,048 numbers at least."""
    step = max(SMALLEST_PIECE, -(-numel // MOST_PIECES))
    return (slice(start, min(start + step, numel)) for start in range(0, numel, step))
