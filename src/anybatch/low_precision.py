"""Numbers too short to be summed in: their sums lose digits."""

import torch
from torch import Tensor

LOW_PRECISION = (torch.bfloat16, torch.float16)


def is_low(tensor: Tensor) -> bool:
    """True of a bf16 or fp16 tensor.

    >>> is_low(torch.zeros(1, dtype=torch.bfloat16)), is_low(torch.zeros(1))
    (True, False)
    """
    return tensor.dtype in LOW_PRECISION


def at_least_fp32(tensor: Tensor) -> Tensor:
    """The tensor itself, or in fp32 where its numbers have fewer than 4 bytes."""
    return tensor.float() if tensor.itemsize < 4 else tensor
