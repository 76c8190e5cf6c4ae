"""What convolutions of the CPU take outside torch's allocator while they run, read off the events of a profile."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

PAGE = 4096
_COLUMNS, _BACKWARD = "aten::_slow_conv2d_backward", "aten::convolution_backward"
_DILATION = 6
"""Which argument of `_BACKWARD` the dilation is."""


def kernel_buffers(events: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """(nanoseconds, bytes) of what these kernels take and give back.

    Where oneDNN does not run, as for a small single row, a convolution unfolds rows into columns that it takes with `new`.
    Where oneDNN has no kernel of its own, as for wide dilations, it multiplies matrices that it packs; not all dilations are
    that wide, so that this is an upper bound.
    """
    for event in events:
        taken = 0
        if event.name() == _COLUMNS:
            outputs, inputs, weight = event.shapes()[:3]
            size = 8 if event.dtypes()[0] == "double" else 4
            taken = size * min(torch.get_num_threads(), inputs[0]) * math.prod(weight[1:]) * math.prod(outputs[2:])
        elif event.name() == _BACKWARD and _is_dilated(event.concrete_inputs()):
            outputs, inputs, weight = event.shapes()[:3]
            places = math.prod(outputs[-2:] if len(outputs) > 3 else outputs[2:])
            taken = min(torch.get_num_threads(), inputs[0]) * packed_bytes(math.prod(weight[1:]), weight[0], places)
        if taken:
            yield event.start_ns(), taken
            yield event.start_ns() + event.duration_ns(), -taken


def takes_buffers(model: nn.Module, num_rows: int) -> bool:
    """True where such kernels may run. Elsewhere names of ops, which can take more memory than they do, tell nothing."""
    layers = [module for module in model.modules() if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    return any(max(layer.dilation) > 1 or (num_rows == 1 and isinstance(layer, nn.Conv2d)) for layer in layers)


def packed_bytes(rows: int, columns: int, inner: int) -> int:
    """What oneDNN packs both factors of a product of matrices into, in fp32, with AVX-512: the larger tiles there are."""
    depth = inner if inner <= 384 else min((inner + 1) // 2, 384)
    return 4 * depth * (-(-rows // 48) * 48 + -(-columns // 8) * 8) + 4 * PAGE


def _is_dilated(arguments: list[Any]) -> bool:
    return len(arguments) > _DILATION and any(one > 1 for one in arguments[_DILATION] or ())
