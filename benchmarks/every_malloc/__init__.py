"""A meter that counts every malloc of a process, whoever calls it, and refuses above an exact number of bytes.

It is a small C library that is loaded before the system's own (`LD_PRELOAD`), so it has to be there when a process starts:
`in_own_process(module, *arguments)` starts one. Linux with glibc and a C compiler only.
"""

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("counting.c")


@cache
def library() -> Path:
    """The compiled library; compiled again where its source is newer."""
    built = Path(tempfile.gettempdir()) / f"anybatch_counting_{os.getuid()}.so"
    if not built.exists() or built.stat().st_mtime < SOURCE.stat().st_mtime:
        fresh = built.with_suffix(f".{os.getpid()}")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(fresh)], check=True)
        fresh.replace(built)
    return built


def in_own_process(module: str, *arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run `python -m module` where every malloc is counted, on one thread, so that numbers are the same every time."""
    environment = {**os.environ, "LD_PRELOAD": str(library()), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout)


class Counted:
    """The counters of this process."""

    def __init__(self) -> None:
        self._inside = ctypes.CDLL(None)
        try:
            for name in ("live", "peak", "large", "refused"):
                getattr(self._inside, f"counted_{name}").restype = ctypes.c_long
        except AttributeError:
            raise RuntimeError("this process does not count its mallocs: start it by in_own_process().") from None

    @property
    def live(self) -> int:
        """Bytes that are allocated now."""
        return int(self._inside.counted_live())

    @property
    def peak(self) -> int:
        """The most bytes since `restart`."""
        return int(self._inside.counted_peak())

    @property
    def num_large(self) -> int:
        """Allocations that could have been refused, since `restart`."""
        return int(self._inside.counted_large())

    @property
    def num_refused(self) -> int:
        """Allocations that were refused, since `restart`."""
        return int(self._inside.counted_refused())

    def restart(self) -> None:
        """Count from now on."""
        self._inside.counted_restart()

    def show_refusals(self) -> None:
        """From now on print the Python stack of whoever is refused, to stderr."""
        faulthandler.register(signal.SIGUSR1, all_threads=False)
        self._inside.counted_signal(signal.SIGUSR1)

    def fail_after(self, num_large: int) -> None:
        """Refuse one large allocation, the one after `num_large` more; -1: none."""
        self._inside.counted_fail_after(ctypes.c_long(num_large))

    @contextmanager
    def limited(self, more: int) -> Iterator[None]:
        """Inside this block no large allocation goes beyond `more` bytes above what is allocated now."""
        self._inside.counted_limit(ctypes.c_long(self.live + more))
        try:
            yield
        finally:
            self._inside.counted_limit(ctypes.c_long(-1))
