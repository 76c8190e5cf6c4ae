"""To the device, without a wait: batches, and the few numbers that the host works out for it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from anybatch.batches.nesting import Batch, map_tensors


def move(batch: Batch, device: torch.device) -> Batch:
    """The same nesting with every tensor on `device`; tensors that are there already are not copied."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def sent(numbers: Sequence[float], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """These numbers on `device`. `torch.tensor(numbers, device=device)` would wait until all that it was given is done."""
    return torch.tensor(numbers, dtype=dtype, device="cpu").to(device, non_blocking=True)
