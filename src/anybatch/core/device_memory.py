"""The memory of accelerators: what is free there, and the most that was in use."""

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def has_counters(device: torch.device | None) -> bool:
    """True of a device whose allocator counts for itself what is in use: not the CPU's, and not Apple's."""
    return device is not None and device.type not in ("cpu", "meta", "mps")


def free_on_device(device: torch.device) -> int:
    """What could still be allocated there, in bytes: what nobody has, and what torch's allocator holds and nobody uses."""
    left, _ = torch.accelerator.get_memory_info(device)
    return int(left + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device))


def with_peak(action: Callable[[], Result], device: torch.device) -> tuple[Result, int]:
    """What `action` returns, and the most that this process had in use there at any moment of it."""
    torch.accelerator.reset_peak_memory_stats(device)
    result = action()
    torch.accelerator.synchronize(device)
    return result, int(torch.accelerator.max_memory_allocated(device))
