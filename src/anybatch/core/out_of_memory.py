"""Out-of-memory errors: recognise them, free memory, try again. Free memory of devices and of the host."""

import errno
import gc
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import clear_frames
from typing import TypeVar

import torch

from anybatch.errors import AnybatchError, first_line

try:
    import resource
except ImportError:  # not a POSIX system
    resource = None  # type: ignore[assignment]

T = TypeVar("T")

_MESSAGES = re.compile(
    "|".join(
        (
            r"DefaultCPUAllocator: (can't allocate|not enough) memory",
            r"could not (create|execute) a primitive(?! desc)",  # oneDNN; "primitive descriptor" is another error
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
    """Return True for the error of an allocator, by its type, or for a `RuntimeError` by its message."""
    if isinstance(error, AnybatchError):
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _MESSAGES.search(str(error)) is not None


def until_it_fits(attempt: Callable[[], T], start_again: Callable[[str], None]) -> tuple[T, int]:
    """Call `attempt` until memory suffices; return its result and the number of retries.

    After each failure memory is freed and `start_again(reason)` called. It restores the state before the attempt and makes
    the next one smaller, or raises, with the last failure as the cause.
    """
    retries = 0
    while True:
        try:
            return attempt(), retries
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            last = error
        clear_frames(last.__traceback__)  # they hold the activations of the failed attempt
        free_memory()
        try:
            start_again(first_line(last))
        except AnybatchError as refused:
            raise refused from last
        retries += 1


def once_more(action: Callable[[], T]) -> T:
    """Call `action`; if memory runs out in it, free memory and call it again, once."""
    try:
        return action()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    free_memory()
    return action()


def free_memory() -> None:
    """Collect garbage and release the accelerator's cached blocks."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def free_bytes(device: torch.device | None) -> int | None:
    """Return the bytes that can still be allocated on a device; None if they are not known."""
    if device is None or device.type == "cpu":
        return free_on_host()
    try:
        return free_on_device(device)
    except (RuntimeError, AssertionError, AttributeError):
        return None


def has_counters(device: torch.device | None) -> bool:
    """Return True for a device whose allocator counts the bytes in use: not the CPU, and not MPS."""
    return device is not None and device.type not in ("cpu", "meta", "mps")


def free_on_device(device: torch.device) -> int:
    """Return the free bytes of a device, including those that torch's allocator has cached."""
    left, _ = torch.accelerator.get_memory_info(device)
    return int(left + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device))


def with_peak(action: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """Call `action`; return its result and this process's peak of allocated bytes on `device`."""
    torch.accelerator.reset_peak_memory_stats(device)
    result = action()
    torch.accelerator.synchronize(device)
    return result, int(torch.accelerator.max_memory_allocated(device))


def free_on_host() -> int | None:
    """Return the bytes that can still be allocated on the host; None if the system does not tell."""
    return min((number for number in (_available(), left_within_limits()) if number is not None), default=None)


def left_within_limits(proc: Path = Path("/proc/self"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes left below the tightest limit: RLIMIT_AS, RLIMIT_DATA, or a control group; None without a limit."""
    return min((max(left, 0) for left in (*_of_process(proc), *_of_groups(proc, groups))), default=None)


def _available() -> int | None:
    available = _fields(Path("/proc/meminfo"), ":").get("MemAvailable")
    if available is not None:
        return int(available.split()[0]) * 1024
    try:  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError):
        return None


def _of_process(proc: Path) -> Iterator[int]:
    if resource is None:
        return
    taken = _fields(proc / "status", ":")
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY and name in taken:
            yield soft - 1024 * int(taken[name].split()[0])


def _of_groups(proc: Path, groups: Path) -> Iterator[int]:
    """Yield the bytes left in the process's group and its parents; inactive page cache counts as free."""
    for folder in _folders(proc, groups):
        for most, now, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            try:
                limit, used = (folder / most).read_text().strip(), int((folder / now).read_text())
            except (OSError, ValueError):
                continue
            if limit.isdigit() and int(limit) < 2**60:  # version 1 has a huge number for "no limit"
                yield int(limit) - used + int(_fields(folder / "memory.stat", " ").get(cached, "0"))


def _folders(proc: Path, groups: Path) -> Iterator[Path]:
    try:
        lines = (proc / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            top = groups / controllers if controllers else groups
            own = top / path.lstrip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(top))


def _fields(path: Path, separator: str) -> dict[str, str]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return {name: rest.strip() for name, found, rest in (line.partition(separator) for line in lines) if found}
