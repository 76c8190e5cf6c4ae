"""Tests that run on the pretend accelerator: in processes of their own, which have it plugged in and stay for the next."""

import atexit
import importlib
import warnings
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import pytest
import torch

from tests.accelerator.plugged import NAME, plug
from tests.processes.ranks import Raised, Ranks


@cache
def _processes() -> Ranks:
    processes = Ranks()
    atexit.register(processes.end)
    return processes


def on_device(test: Callable[..., None]) -> Callable[..., None]:
    """The test, run where the device is. It is given by name, so its arguments are plain values, and fixtures have none."""
    return _on_devices(1, test)


def on_each_device(test: Callable[..., None]) -> Callable[..., None]:
    """The test, run here on the host and where the device is: its parameter `device` is the one it runs on."""
    elsewhere = on_device(test)

    @wraps(test)
    def run(device: str, **arguments: Any) -> None:
        if device == "cpu":
            test(device=torch.device(device), **arguments)
        else:
            elsewhere(device=device, **arguments)

    return pytest.mark.parametrize("device", ["cpu", NAME])(run)


def on_two_devices(test: Callable[..., None]) -> Callable[..., None]:
    """The test, run by two ranks, each with a device of its own."""
    return _on_devices(2, test)


def _on_devices(ranks: int, test: Callable[..., None]) -> Callable[..., None]:
    @wraps(test)
    def run(**arguments: Any) -> None:
        told = _processes().outcomes(ranks, _call, test.__module__, test.__name__, arguments)
        for rank, one in enumerate(told):
            assert not isinstance(one, Raised), f"on the device, rank {rank} of {ranks}:\n{one.trace}"

    return run


def _call(module: str, name: str, arguments: dict[str, Any]) -> None:
    there = plug()
    if "device" in arguments:
        arguments["device"] = there
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "memory ran out", UserWarning)  # as pyproject.toml has it for the suite
        getattr(importlib.import_module(module), name).__wrapped__(**arguments)
