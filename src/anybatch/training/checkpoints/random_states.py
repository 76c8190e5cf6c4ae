"""Every random state that a training run draws from: setting, reading and putting back."""

import random
import sys
from typing import Any

import torch

from anybatch.state import OuterRandom, outer_random


def seed_all(seed: int) -> None:
    """Seed torch on every device, Python, and NumPy where it is loaded."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def random_states() -> dict[str, Any]:
    """All random states, as tensors and plain values that `torch.load(weights_only=True)` takes."""
    states = {"torch": torch.get_rng_state(), **outer_random().as_values()}
    for name, module in _accelerators():
        states[name] = [module.get_rng_state(device) for device in range(module.device_count())]
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Put back what `random_states` read; devices that this machine lacks are left out."""
    torch.set_rng_state(states["torch"])
    OuterRandom.of_values(states).restore()
    for name, module in _accelerators():
        for device, state in enumerate(states.get(name, ())[: module.device_count()]):
            module.set_rng_state(state, device)


def _accelerators() -> list[tuple[str, Any]]:
    """The kind of accelerator that this machine has, and torch's module for it: one, or none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return [] if found is None else [(found.type, torch.get_device_module(found))]


def seed_rank(rank: int) -> None:
    """Seed everything from the next draw of torch's state: where all ranks have the same, each gets another."""
    drawn = int(torch.randint(2**62, ()))
    seed_all((drawn + rank * 1_000_003) % 2**63)
