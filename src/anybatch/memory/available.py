"""How much memory a device has free."""

import os
from pathlib import Path

import torch

from anybatch.errors import PlanError
from anybatch.memory.limits import left_within_limits


def available_bytes(device: torch.device) -> int:
    """What could still be allocated there now, in bytes."""
    if device.type == "cpu":
        free, left = _available_on_host(), left_within_limits()
        return free if left is None else min(free, left)
    try:
        free, _ = torch.accelerator.get_memory_info(device)
        cached = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    except (RuntimeError, AssertionError, AttributeError) as error:
        raise PlanError(
            f"memory=None asks what {device} has free, but it cannot be asked here: {str(error).splitlines()[0][:120]}. Give "
            'memory="24GiB", or whatever the card has.'
        ) from None
    return int(free + cached)


def _available_on_host() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = {name: rest for name, _, rest in (line.partition(":") for line in lines)}
        return int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError):
        raise PlanError(
            'memory=None: this system does not tell how much memory is free. Give memory="6GiB", or whatever there is.'
        ) from None
