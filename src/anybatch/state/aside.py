"""Copies that take none of the memory that is short: from an accelerator to the host, from the CPU to disk."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from anybatch.state.disk import TensorFile
from anybatch.torch_inside import FakeTensor


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


class CopyInPieces:
    """A copy aside of one tensor, read back a piece at a time: numbers in the order of `tensor.flatten()`."""

    def __init__(self, tensor: Tensor, file: TensorFile) -> None:
        flat = tensor.detach().flatten()
        self._dtype, self._device, self._numel = tensor.dtype, tensor.device, flat.numel()
        self._file = file
        is_here = self._device.type == "cpu" and type(flat) is Tensor
        self._offset = file.write(flat.view(torch.uint8))[0] if is_here and self._numel else 0
        self._host = None if is_here else flat.to("cpu", copy=True)

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        for piece in pieces_of(self._numel):
            if self._host is not None:
                yield piece, self._host[piece].to(self._device)
            else:
                size = self._dtype.itemsize
                read = self._file.read(self._offset + piece.start * size, (piece.stop - piece.start) * size)
                yield piece, read.view(self._dtype)


def pieces_of(numel: int) -> Iterator[slice]:
    """Slices of so many numbers: 64 at most, of 2,048 numbers at least."""
    step = max(SMALLEST_PIECE, -(-numel // MOST_PIECES))
    return (slice(start, min(start + step, numel)) for start in range(0, numel, step))
