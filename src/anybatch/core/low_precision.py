"""Numbers too short to be summed in: their sums lose digits."""

import torch
from torch import Tensor

from anybatch.core.torch_private import FakeTensor

LOW_PRECISION = (torch.bfloat16, torch.float16)


def is_low(value: object) -> bool:
    """True of a bf16 or fp16 tensor, and of nothing else.

    >>> is_low(torch.zeros(1, dtype=torch.bfloat16)), is_low(torch.zeros(1))
    (True, False)
    """
    return isinstance(value, Tensor) and value.dtype in LOW_PRECISION


def number_in(value: Tensor) -> float:
    """The one number of a tensor; 1 where it has none, because a plan runs on tensors without numbers."""
    return 1.0 if isinstance(value, FakeTensor) else value.item()


def at_least_fp32(tensor: Tensor) -> Tensor:
    """The tensor itself, or in fp32 where its numbers have fewer than 4 bytes."""
    return tensor.float() if tensor.itemsize < 4 else tensor
