"""Out of memory: recognising it, freeing what can be freed, and starting again."""

import errno
import gc
import re
from collections.abc import Callable
from traceback import clear_frames
from typing import TypeVar

import torch

from anybatch.core.device_memory import free_on_device
from anybatch.core.host_memory import free_on_host
from anybatch.errors import AnybatchError, first_line

T = TypeVar("T")

_MESSAGES = re.compile(
    "|".join(
        (
            r"DefaultCPUAllocator: (can't allocate|not enough) memory",
            r"could not (create|execute) a primitive(?! desc)",  # oneDNN; without a descriptor it is another matter
            r"\b(CUDA|HIP|XPU|MPS backend|NPU|MLU|MUSA) out of memory",
            r"\b(CUDA|HIP|XPU) error: out of memory",
            r"\b(CUBLAS|CUDNN|CUSPARSE|CUSOLVER|HIPBLAS|MIOPEN)_STATUS_ALLOC_FAILED",
            r"\bCUFFT_ALLOC_FAILED",
            r"^Invalid buffer size: .*[KMGT]i?B",  # MPS, of one tensor that is too large
            r"\bstd::bad_alloc\b|^bad allocation$",
        )
    ),
    re.MULTILINE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """True of what an allocator raises when memory runs out, by type, or where torch has only `RuntimeError`, by message."""
    if isinstance(error, AnybatchError):
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _MESSAGES.search(str(error)) is not None


def free_memory() -> None:
    """Collect what nobody holds, and give the accelerator's cached blocks back."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def free_bytes(device: torch.device | None) -> int | None:
    """What could still be allocated there now; None where nobody tells."""
    if device is None or device.type == "cpu":
        return free_on_host()
    try:
        return free_on_device(device)
    except (RuntimeError, AssertionError, AttributeError):
        return None


def until_it_fits(attempt: Callable[[], T], start_again: Callable[[str], None]) -> tuple[T, int]:
    """What `attempt` returns once memory suffices, and how often it did not.

    After each failure memory is freed and `start_again(reason)` called, which makes everything what it was before the
    attempt and the next one smaller, or raises; the last failure is then the cause, with its traceback.
    """
    retries = 0
    while True:
        try:
            return attempt(), retries
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            last = error
        # its frames held the activations of the failed attempt: its lines stay, and what they held goes
        clear_frames(last.__traceback__)
        free_memory()
        try:
            start_again(first_line(last))
        except AnybatchError as refused:
            raise refused from last
        retries += 1


def once_more(action: Callable[[], T]) -> T:
    """What `action` returns; where memory ran out in it, memory is freed and it is done again, once."""
    try:
        return action()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    free_memory()
    return action()
