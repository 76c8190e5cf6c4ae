"""Torch's random generators, of the CPU and of accelerators, read and put back."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from anybatch.core.torch_private import without_modes


@dataclass(frozen=True, slots=True)
class RandomState:
    """Torch's generators at one moment."""

    cpu: Tensor
    accelerators: tuple[tuple[torch.device, Tensor], ...]

    def restore(self) -> None:
        """Draw from here again."""
        torch.set_rng_state(self.cpu)
        for device, state in self.accelerators:
            torch.get_device_module(device).set_rng_state(state, device)

    def is_now(self) -> bool:
        """True if nothing was drawn since."""
        with without_modes():  # the states are real, also where a mode fakes the model's tensors
            now = random_state(device for device, _ in self.accelerators)
            pairs = zip(self.accelerators, now.accelerators, strict=True)
            return torch.equal(self.cpu, now.cpu) and all(torch.equal(mine, other) for (_, mine), (_, other) in pairs)


def random_state(devices: Iterable[torch.device]) -> RandomState:
    """The state of the CPU's generator and of those of `devices`."""
    if not has_accelerator():
        return RandomState(torch.get_rng_state(), ())
    accelerators = sorted({device for device in devices if device.type not in ("cpu", "meta")}, key=str)
    states = tuple((device, torch.get_device_module(device).get_rng_state(device)) for device in accelerators)
    return RandomState(torch.get_rng_state(), states)


@cache
def has_accelerator() -> bool:
    """True where this machine has a device beside the CPU."""
    return torch.accelerator.is_available()
