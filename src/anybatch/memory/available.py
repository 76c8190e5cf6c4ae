"""How much memory a device has free."""

import gc

import torch

from anybatch.errors import PlanError
from anybatch.state import free_bytes


def available_bytes(device: torch.device) -> int:
    """What could still be allocated there now, in bytes. Garbage is collected first: it is free, and not yet counted so."""
    gc.collect()
    free = free_bytes(device)
    if free is not None:
        return free
    if device.type == "cpu":
        raise PlanError(
            'memory=None: this system does not tell how much memory is free. Give memory="6GiB", or whatever there is.'
        )
    raise PlanError(
        f'memory=None asks what {device} has free, but it cannot be asked here. Give memory="24GiB", or whatever the card has.'
    )
