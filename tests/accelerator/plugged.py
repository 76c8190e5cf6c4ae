"""Plugging the pretend accelerator into a process: torch then knows a device called `pretend`, for good.

A process that has it is no longer one without an accelerator, so tests run what they ask of it elsewhere: see `on_device`.
"""

import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.accelerator.building import build

NAME = "pretend"
UNLIMITED = 1 << 40


@cache
def plug() -> torch.device:
    """The device, known to torch from now on."""
    torch.ops.load_library(str(build()))
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    return torch.device(NAME, 0)


@dataclass(frozen=True, slots=True)
class Counted:
    """What crossed the wall, and how often the host waited."""

    waits: int
    operations: int
    copies_to_host: int
    bytes_to_host: int
    copies_to_device: int
    bytes_to_device: int
    unsafe_frees: int
    """Memory given back while another stream may still use it."""

    def __sub__(self, before: "Counted") -> "Counted":
        return Counted(*(getattr(self, one.name) - getattr(before, one.name) for one in fields(self)))


def counted() -> Counted:
    """Since the device was plugged in."""
    now = torch.ops.pretend.counters()
    return Counted(*(now[one.name] for one in fields(Counted)))


@contextmanager
def limit(size: int) -> Iterator[None]:
    """The device has `size` bytes, all told."""
    torch.ops.pretend.set_limit(size)
    try:
        yield
    finally:
        torch.ops.pretend.set_limit(UNLIMITED)


@contextmanager
def no_waits() -> Iterator[None]:
    """A wait for the device raises, where it is."""
    torch.ops.pretend.refuse_waits(True)
    try:
        yield
    finally:
        torch.ops.pretend.refuse_waits(False)


@contextmanager
def queued() -> Iterator[list[str]]:
    """What the queues were given, in order: the number of the stream, and what."""
    log: list[str] = []
    torch.ops.pretend.start_log()
    try:
        yield log
    finally:
        log += torch.ops.pretend.take_log()


def allocations() -> list[tuple[int, int, int]]:
    """(address, bytes, stream) of what was allocated while it was last logged; bytes < 0 where it was freed."""
    return [tuple(one) for one in torch.ops.pretend.take_trace().tolist()]


def _module() -> Any:
    """What torch calls by the device's name."""
    module = types.ModuleType(f"torch.{NAME}")
    names: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: nullcontext(),
        "_is_in_bad_fork": lambda: False,
        "manual_seed": torch.ops.pretend.set_seed,
        "manual_seed_all": torch.ops.pretend.set_seed,
        "get_rng_state": lambda device=0: torch.ops.pretend.random_state(),
        "set_rng_state": lambda state, device=0: torch.ops.pretend.set_random_state(state),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "Stream": lambda device=None, priority=0: torch.Stream(torch.device(NAME, 0), priority=priority),
        "Event": lambda enable_timing=False: torch.Event(torch.device(NAME, 0), enable_timing=enable_timing),
        "current_stream": lambda device=None: torch.accelerator.current_stream(),
        "stream": _in_stream,
        "set_stream": torch.accelerator.set_stream,
        "synchronize": lambda device=None: torch.accelerator.synchronize(),
        "memory_allocated": torch.accelerator.memory_allocated,
        "max_memory_allocated": torch.accelerator.max_memory_allocated,
        "empty_cache": torch.accelerator.empty_cache,
    }
    for name, value in names.items():
        setattr(module, name, value)
    return module


@contextmanager
def _in_stream(stream: torch.Stream | None) -> Iterator[None]:
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream or before)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def tensors_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Bit for bit, wherever they lie."""
    return all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(ours, theirs, strict=True))
