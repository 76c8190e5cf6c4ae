"""Where a run comes from: versions, the git revision, the command."""

import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that decide a run's numbers, as far as they are installed."""
    found = {"python": platform.python_version()}
    for package in ("torch", "torchdata", "numpy", "scikit-learn"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_revision() -> str | None:
    """The revision of the working directory, with + where files are changed; None outside a repository."""
    try:
        revision = _git("rev-parse", "HEAD")
        return revision + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def command_line() -> str:
    """What was typed."""
    return shlex.join(["anybatch", *sys.argv[1:]])


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=5).stdout.strip()
