"""How much memory a device has free."""

import torch

from anybatch.device_memory import free_on_device
from anybatch.errors import PlanError
from anybatch.host_memory import free_on_host


def available_bytes(device: torch.device) -> int:
    """What could still be allocated there now, in bytes."""
    if device.type == "cpu":
        free = free_on_host()
        if free is None:
            raise PlanError(
                'memory=None: this system does not tell how much memory is free. Give memory="6GiB", or whatever there is.'
            )
        return free
    try:
        return free_on_device(device)
    except (RuntimeError, AssertionError, AttributeError) as error:
        raise PlanError(
            f"memory=None asks what {device} has free, but it cannot be asked here: {str(error).splitlines()[0][:120]}. Give "
            'memory="24GiB", or whatever the card has.'
        ) from None
