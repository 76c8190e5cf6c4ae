"""Run folders as the commands use them: choose one, write its first `run.json` and its page, record how the run ended."""

import dataclasses
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from anybatch import __version__
from anybatch.app.cli.screen import say
from anybatch.app.records.run_folder import RunFolder
from anybatch.app.records.schema import Comparison, PlanRecord, ProofRecord, Run, RunKind, Trace
from anybatch.app.training.settings import Settings
from anybatch.app.training.tasks.lookup import BUILT_IN, check_task_exists, find_task
from anybatch.errors import NonFiniteError, RunError, first_line

if TYPE_CHECKING:
    from anybatch.app.training.tasks.task import Task


def begin(task: str, out: Path | None, doing: str, *, is_quiet: bool) -> "tuple[RunFolder, Callable[[], Task]]":
    """Check what a command needs, print what it does, load the task; return the folder and the task's builder."""
    check_task_exists(task)
    folder = new_folder(task, out)
    check_installed("torchdata")
    say(f"anybatch {__version__}  {doing} {short_name(task)}", is_quiet=is_quiet)
    return folder, find_task(task)  # this loads torch


def check_installed(*modules: str) -> None:
    """Raise now, without loading them, for modules that a run would miss at its end."""
    for name in (*modules, "jinja2"):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def new_folder(task: str, out: Path | None) -> RunFolder:
    """Choose the folder of a new run, and refuse one that holds a run or cannot be written to. Nothing is left in it."""
    if out is None:
        stem = Path("runs") / f"{short_name(task)}-{datetime.now():%Y%m%d-%H%M%S}"
        out, count = stem, 1
        while out.exists():
            count += 1
            out = stem.with_name(f"{stem.name}-{count}")
    if (out / "run.json").exists():
        raise RunError(f"{out} already holds a run. Go on with it by --resume {out}, or give another --out.")
    if out.exists() and not out.is_dir():
        raise RunError(f"{out} is a file. Give --out a folder.")
    if any("\ud800" <= letter <= "\udfff" for letter in str(out)):  # bytes that are not UTF-8
        raise RunError(f"--out {out} is no UTF-8, and torch writes to no such name. Give another --out.")
    try:
        with TemporaryFile(dir=next(path for path in (out, *out.absolute().parents) if path.exists())) as file:
            file.write(b" ")
    except OSError as error:
        raise RunError(f"nothing can be written to {out} ({first_line(error)}). Give another --out.") from None
    return RunFolder(out)


def first_record(kind: RunKind, task: str, settings: Settings) -> Run:
    """Return `run.json` of a run that starts now."""
    return Run(
        anybatch=__version__,
        kind=kind,
        task=task if task in BUILT_IN else str(Path(task).resolve()),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["anybatch", *sys.argv[1:]]),
        seed=settings.seed,
        versions=versions(),
        git=_git_revision(),
        settings=dataclasses.asdict(settings),
    )


def short_name(task: str) -> str:
    """Return a built-in task's name, or the stem of a task's file."""
    return task if task in BUILT_IN else Path(task).stem


def write_page(folder: RunFolder) -> Path:
    """Write the run's page from the files in its folder."""
    from anybatch.app.report.page import write_page

    return write_page(folder.path)


def finish(
    folder: RunFolder, run: Run, record: Comparison | PlanRecord | ProofRecord | Trace, *, is_quiet: bool
) -> None:
    """Write the record of a finished run, its `run.json` and its page, and print where the page is."""
    folder.write(record)
    folder.write(dataclasses.replace(run, status="finished"))
    say(f"page: {write_page(folder)}", is_quiet=is_quiet)


@contextmanager
def recording_failure(folder: RunFolder, run: Run) -> Iterator[None]:
    """Record an exception that leaves the block in `run.json`, as "stopped" or "failed" with its reason."""
    try:
        yield
    except BaseException as error:
        status, reason = _status_after(error)
        with suppress(Exception):
            folder.write(dataclasses.replace(run, status=status, reason=reason))
            write_page(folder)
        raise


def _status_after(error: BaseException) -> tuple[str, str]:
    """Return (status, reason) of a run that this exception ended.

    >>> _status_after(SystemExit(0))
    ('failed', "the task's own code called sys.exit(0)")
    """
    if isinstance(error, KeyboardInterrupt):
        return "stopped", "it was interrupted a second time, amid an update"
    if isinstance(error, BrokenPipeError):
        return "stopped", "what it prints to was closed"
    if isinstance(error, SystemExit):
        return "failed", f"the task's own code called sys.exit({error.code!r})"
    return "stopped" if isinstance(error, NonFiniteError) else "failed", first_line(error)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that affect a run's numbers."""
    found = {"python": platform.python_version()}
    for package in ("torch", "torchdata", "numpy", "scikit-learn"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _git_revision() -> str | None:
    """Return the revision of the working directory, with + if files changed; None outside a repository."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=5).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
