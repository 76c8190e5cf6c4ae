"""What convolutions of the CPU take outside torch's allocator while they run, read off the shapes that they are called with."""

import math
from time import time_ns
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.torch_inside import TorchDispatchMode, is_unfolding

PAGE = 4096
_BACKWARD = torch.ops.aten.convolution_backward.default


class KernelBuffers(TorchDispatchMode):
    """Inside this block, what backward passes of convolutions take outside torch's allocator is noted, and when.

    Names and shapes of ops are in a profile too, which takes more memory for them than many a model does.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocations: list[tuple[int, int]] = []
        """(nanoseconds, bytes): more than 0 were taken, less were given back."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        taken = buffer_bytes(*args) if func is _BACKWARD else 0
        begin = time_ns()
        output = func(*args, **(kwargs or {}))
        if taken:
            self.allocations += [(begin, taken), (time_ns(), -taken)]
        return output


def buffer_bytes(outputs: Tensor, inputs: Tensor, weight: Tensor, _: Any, *geometry: Any) -> int:
    """What the backward pass of this convolution takes beside its tensors.

    Where oneDNN does not run, as for a small single row, rows are unfolded into columns, which are taken with `new`.
    Where oneDNN has no kernel of its own, as for wide dilations, it multiplies matrices that it packs; not all dilations are
    that wide, so that this is an upper bound.
    """
    stride_to_groups, dilation = geometry[:-1], geometry[2]
    side_by_side = min(torch.get_num_threads(), inputs.shape[0])
    if is_unfolding(inputs, weight, *stride_to_groups):
        return inputs.element_size() * side_by_side * math.prod(weight.shape[1:]) * math.prod(outputs.shape[2:])
    if max(dilation) > 1:
        places = math.prod(outputs.shape[-2:] if outputs.dim() > 3 else outputs.shape[2:])
        return side_by_side * packed_bytes(math.prod(weight.shape[1:]), weight.shape[0], places)
    return 0


def takes_buffers(model: nn.Module, num_rows: int = 1) -> bool:
    """True where such kernels may run in micro-batches of so many rows."""
    layers = [module for module in model.modules() if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    return any(max(layer.dilation) > 1 or (num_rows == 1 and not isinstance(layer, nn.Conv3d)) for layer in layers)


def packed_bytes(rows: int, columns: int, inner: int) -> int:
    """What oneDNN packs both factors of a product of matrices into, in fp32, with AVX-512: the larger tiles there are."""
    depth = inner if inner <= 384 else min((inner + 1) // 2, 384)
    return 4 * depth * (-(-rows // 48) * 48 + -(-columns // 8) * 8) + 4 * PAGE
