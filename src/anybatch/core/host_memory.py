"""Host memory that this process may still take: what is free, within the limits that are set for it."""

import os
from collections.abc import Iterator
from pathlib import Path

try:
    import resource
except ImportError:  # not a POSIX system
    resource = None  # type: ignore[assignment]


def free_on_host() -> int | None:
    """What could still be allocated now, in bytes; None where the system does not tell."""
    return min((number for number in (_available(), left_within_limits()) if number is not None), default=None)


def left_within_limits(proc: Path = Path("/proc/self"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The least that any limit leaves: of the process (RLIMIT_AS, RLIMIT_DATA), or of a control group; None without one."""
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
    """Of the process's own group and all above it; files of the page cache can be given back, and do not count."""
    for folder in _folders(proc, groups):
        for most, now, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            try:
                limit, used = (folder / most).read_text().strip(), int((folder / now).read_text())
            except (OSError, ValueError):
                continue
            if limit.isdigit() and int(limit) < 2**60:  # version 1 writes "none" as a huge number
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
