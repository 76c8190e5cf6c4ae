"""Run folders from the command line's side: choosing one, its first `run.json`, its page, and how a run ended."""

import dataclasses
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from anybatch import __version__
from anybatch.app.cli.screen import say
from anybatch.app.records.run_folder import RunFolder
from anybatch.app.records.schema import Run, RunKind
from anybatch.app.training.settings import Settings
from anybatch.app.training.tasks.lookup import BUILT_IN, check_task_exists, find_task
from anybatch.errors import NonFiniteError, RunError, first_line

if TYPE_CHECKING:
    from anybatch.app.training.tasks.task import Task


def begin(task: str, out: Path | None, doing: str, *, is_quiet: bool) -> "tuple[RunFolder, Callable[[], Task]]":
    """Check what a command needs, say what it does, and load the task: its folder, and what builds it."""
    check_task_exists(task)
    folder = new_folder(task, out)
    check_installed("torchdata")
    say(f"anybatch {__version__}  {doing} {short_name(task)}", is_quiet=is_quiet)
    return folder, find_task(task)  # torch is loaded from here on


def check_installed(*modules: str) -> None:
    """Raise for what a run would miss at its end, before it begins; nothing is loaded."""
    for name in (*modules, "jinja2"):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def new_folder(task: str, out: Path | None) -> RunFolder:
    """The folder that a new run goes to; one that already holds a run is refused."""
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
    if any("\ud800" <= letter <= "\udfff" for letter in str(out)):  # bytes that are no UTF-8
        raise RunError(f"--out {out} is no UTF-8, and torch writes to no such name. Give another --out.")
    _check_writable(out)
    return RunFolder(out)


def _check_writable(out: Path) -> None:
    """Raise where nothing can be written below `out`, before anything is computed; nothing is left there."""
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    try:
        with TemporaryFile(dir=there) as file:
            file.write(b" ")
    except OSError as error:
        raise RunError(f"nothing can be written to {out} ({first_line(error)}). Give another --out.") from None


def first_record(kind: RunKind, task: str, settings: Settings) -> Run:
    """`run.json` as it is when a run starts."""
    return Run(
        anybatch=__version__,
        kind=kind,
        task=task if task in BUILT_IN else str(Path(task).resolve()),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["anybatch", *sys.argv[1:]]),
        seed=settings.seed,
        versions=versions(),
        git=git_revision(),
        settings=asdict(settings),
    )


def short_name(task: str) -> str:
    """The task in a word: its name, or its file's."""
    return task if task in BUILT_IN else Path(task).stem


def write_page(folder: RunFolder) -> Path:
    """Write the run's page, from the files in its folder."""
    from anybatch.app.report.page import write_page

    return write_page(folder.path)


@contextmanager
def its_end_told(folder: RunFolder, run: Run) -> Iterator[None]:
    """The block of a run. Where an exception leaves it, the run is "stopped" or "failed", with the reason, as far as it can
    be written."""
    try:
        yield
    except BaseException as error:
        status, reason = how_it_ended(error)
        with suppress(Exception):
            folder.write(dataclasses.replace(run, status=status, reason=reason))
            write_page(folder)
        raise


def how_it_ended(error: BaseException) -> tuple[str, str]:
    """Whether someone stopped a run or it failed, and why, in a line.

    >>> how_it_ended(SystemExit(0))
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


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=5).stdout.strip()
