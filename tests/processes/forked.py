"""Running a function, a program or the command line in a process of its own, as `subprocess.run` does, but forked."""

import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.processes.server import server


@dataclass(frozen=True, slots=True)
class Completed:
    """What a process left; `returncode` is -n where signal n ended it."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class Started:
    """A process that runs."""

    process: ForkServerProcess
    folder: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def wait(self) -> Completed:
        self.process.join()
        assert self.process.exitcode is not None
        return Completed(self.process.exitcode, *((self.folder / name).read_text() for name in ("stdout", "stderr")))


@contextmanager
def started(
    action: Callable[..., Any], *arguments: Any, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Iterator[Started]:
    """`action` of a module, called in a process of its own; what still runs at the end of the block is killed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for stream in ("stdout", "stderr"):
            (folder / stream).touch()
        process = server().Process(target=_run, args=(folder, cwd or Path.cwd(), dict(env or {}), action, arguments))
        process.start()
        try:
            yield Started(process, folder)
        finally:
            process.kill()
            process.join()


def run_function(
    action: Callable[..., Any], *arguments: Any, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Completed:
    """What it returns is its exit code: None is 0."""
    with started(action, *arguments, cwd=cwd, env=env) as process:
        return process.wait()


def run_anybatch(*arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Completed:
    """The command line."""
    return run_function(command_line, arguments, cwd=cwd, env=env)


def run_code(code: str, *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Completed:
    """A program, as `python -c` runs it."""
    return run_function(program, code, arguments, cwd=cwd, env=env)


def run_module(
    module: str, *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Completed:
    """A module, as `python -m` runs it."""
    return run_function(main_module, module, arguments, cwd=cwd, env=env)


def command_line(arguments: tuple[str, ...]) -> int:
    from anybatch.app.cli.main import run

    return run(list(arguments))


def program(code: str, arguments: tuple[str, ...]) -> None:
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


def main_module(module: str, arguments: tuple[str, ...]) -> None:
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _run(
    folder: Path, cwd: Path, env: Mapping[str, str], action: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    for descriptor, name in enumerate(("/dev/null", "stdout", "stderr")):
        mode = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_APPEND
        os.dup2(os.open(folder / name, mode), descriptor)  # an absolute name stays itself
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - multiprocessing has put /dev/null there, opened elsewhere
    # as a shell in a terminal has them, whatever started pytest
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.chdir(cwd)
    os.environ.update(env)
    sys.exit(action(*arguments))
