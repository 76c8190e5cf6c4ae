"""One process at a time works in a run folder: a requeued job and the one before it would delete each other's files."""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from anybatch.errors import RunError

LOCK = "run.lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The block in which this process alone works in `folder`; an error that names the other process where one does already.

    The system lets go of the lock when the process ends, however it ends; the file stays. A folder that is made here and gets
    nothing else is removed again.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _take(handle, folder)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        if [path.name for path in folder.glob("*")] == [LOCK]:
            (folder / LOCK).unlink(missing_ok=True)
        os.close(handle)
        for path in missing:
            with suppress(OSError):
                path.rmdir()


def _take(handle: int, folder: Path) -> None:
    if os.name != "posix":
        return
    import fcntl

    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of this process alone: its children do not hold it
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return  # a file system that has no locks
        holder = os.pread(handle, 500, 0).decode(errors="replace").strip() or "another process"
        raise RunError(
            f"{folder} is in use by {holder}. Wait for its end, or end it; a new run can go to another --out."
        ) from None
