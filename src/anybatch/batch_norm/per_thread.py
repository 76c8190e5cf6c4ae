"""What torch keeps per thread, carried from one thread into another."""

import contextvars
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from anybatch.core import TorchDispatchMode, dispatch_modes, function_modes

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadState:
    """Grad mode, autocast, modes (fake tensors, default device, meters), intra-op threads, current device and stream."""

    is_grad_enabled: bool
    autocasts: tuple[tuple[str, torch.dtype], ...]
    is_autocast_cached: bool
    num_threads: int
    device_index: int | None
    stream: Any
    function_modes: tuple[TorchFunctionMode, ...]
    dispatch_modes: tuple[TorchDispatchMode, ...]
    context: contextvars.Context = field(repr=False)

    def run(self, work: Callable[[], T]) -> T:
        """Do `work` in this thread as if it ran where the state was taken."""
        torch.set_num_threads(self.num_threads)
        with ExitStack() as stack:
            if self.device_index is not None:
                torch.accelerator.set_device_index(self.device_index)
                torch.accelerator.set_stream(self.stream)
            stack.enter_context(torch.set_grad_enabled(self.is_grad_enabled))
            for device_type, dtype in self.autocasts:
                stack.enter_context(torch.autocast(device_type, dtype, cache_enabled=self.is_autocast_cached))
            for function_mode in self.function_modes:
                stack.enter_context(function_mode)
            for dispatch_mode in self.dispatch_modes:
                stack.enter_context(dispatch_mode)
            return self.context.copy().run(work)


def thread_state() -> ThreadState:
    """The state of this thread."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_types = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return ThreadState(
        is_grad_enabled=torch.is_grad_enabled(),
        autocasts=tuple(
            (device_type, torch.get_autocast_dtype(device_type))
            for device_type in device_types
            if torch.is_autocast_enabled(device_type)
        ),
        is_autocast_cached=torch.is_autocast_cache_enabled(),
        num_threads=torch.get_num_threads(),
        device_index=None if accelerator is None else torch.accelerator.current_device_index(),
        stream=None if accelerator is None else torch.accelerator.current_stream(),
        function_modes=tuple(function_modes()),
        dispatch_modes=tuple(dispatch_modes()),
        context=contextvars.copy_context(),
    )
