"""The entry point: every error becomes one line on stderr and an exit code."""

import os
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import NoReturn

from anybatch.app.cli.screen import printable
from anybatch.app.training.launch import find_launch
from anybatch.display import did_you_mean
from anybatch.errors import AnybatchError, NonFiniteError, first_line

MOST_FRAMES = 4
"""How much of a task's own traceback is shown."""


LONGEST_WORD = 300
"""Longer names are cut in messages."""


def main() -> NoReturn:
    """Run the command line of this process and leave with its exit code."""
    # the profiler of torch writes lines about itself to stderr unless told not to, before it is loaded
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if find_launch() is None:  # on many ranks, what torch says of its collectives is to be seen
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """The exit code of the command line `anybatch ARGUMENTS`."""
    try:
        from anybatch.app.cli.app import app
    except ModuleNotFoundError as error:
        return _fail(f"the command line needs {error.name}. Install it with: pip install 'anybatch[cli]'", 2)
    removed = _removed(arguments)
    if removed is not None:
        return _fail(removed, 2)
    empty = _empty_option(arguments)
    if empty is not None:
        return _fail(f"{empty} is empty: give it a value, or leave it out.", 2)
    try:
        code = app(args=arguments, prog_name="anybatch", standalone_mode=False)
    except SystemExit as error:
        if not _is_of_a_task(error):
            raise
        return _fail(
            f"a task's own code called sys.exit({error.code!r}), so that what was asked for did not happen.", 2
        )
    except Exception as error:
        return _code_of(error)
    return code if isinstance(code, int) else 0


def _removed(arguments: list[str]) -> str | None:
    """The message for a command or an option that earlier versions had."""
    if arguments[:1] == ["advise"]:
        return (
            "there is no command 'advise' any more: its predictions were right within a factor of five only. "
            "Update(noise=8) and anybatch train --noise 8 measure the noise scale; docs/noise.md says how to read it."
        )
    options = {argument.partition("=")[0] for argument in arguments if arguments[0] == "plan"}
    for option in ("--ranks", "--bandwidth", "--latency", "--flops"):
        if option in options:
            return (
                f"anybatch plan has no {option} any more: what many ranks take was a model that no network confirmed. "
                "docs/scale.md has its formulas and tables, and benchmarks/scale_model.py the model."
            )
    return None


def _empty_option(arguments: list[str]) -> str | None:
    """The first argument that is an empty text; a script that `doctor` runs may have such."""
    if arguments[:1] == ["doctor"]:
        return None
    for before, argument in zip(["an argument", *arguments], arguments, strict=False):
        if argument == "":
            return before if before.startswith("-") else "an argument"
        if argument.startswith("--") and argument.endswith("="):
            return argument[:-1]
    return None


def _code_of(error: Exception) -> int:
    """Say what went wrong, in a line where that is enough; the exit code."""
    from typer import Abort
    from typer.exceptions import TyperException

    if isinstance(error, TyperException):
        return _fail(_with_nearest(error.format_message()) or "nothing to do; see anybatch --help.", error.exit_code)
    if isinstance(error, Abort):
        return 1
    if isinstance(error, AnybatchError):
        return _fail_of(error)
    name = (getattr(error, "name", None) or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and name in _EXTRAS:
        return _fail(f"this needs {error.name}. Install it with: pip install 'anybatch[{_EXTRAS[name]}]'", 2)
    if _is_of_a_task(error):
        print(short_traceback(error), file=sys.stderr)
        return _fail(f"the task's own code raised {first_line(error)}", 2)
    if isinstance(error, OSError):
        return _fail(f"{first_line(error)}. Look at the disk and at the folder; what was saved before is whole.", 2)
    traceback.print_exception(error)
    return _fail(first_line(error), 2)


_EXTRAS = {
    "torchdata": "train",
    "sklearn": "train",
    "numpy": "train",
    "jinja2": "report",
    "rich": "cli",
    "tensorboard": "tensorboard",
}


def _with_nearest(message: str) -> str:
    """What the parser says, in a line; where it lists the values that an option takes, with the one that was meant."""
    text = " ".join(message.split())
    given, _, known = text.partition(" is not one of ")
    return (
        text.removesuffix(".") + (did_you_mean(given.split("'")[-2], known.split("'")[1::2]) or ".") if known else text
    )


def _fail_of(error: AnybatchError) -> int:
    from anybatch.app.training.tasks.lookup import TaskRaisedError

    code = 1 if isinstance(error, NonFiniteError) else 2
    if getattr(error, "is_told", False):  # rank 0 has said it
        return code
    if isinstance(error, TaskRaisedError) and error.__cause__ is not None:
        print(short_traceback(error.__cause__), file=sys.stderr)
    from anybatch.app.lessons.pages.see_lessons import lesson_of_error, see

    ended = "" if str(error).endswith((".", "?", "!")) else "."
    return _fail(f"{error}{ended} {see(lesson_of_error(error))}", code)


def _fail(message: str, code: int) -> int:
    launch = find_launch()
    who = "anybatch" if launch is None or launch.rank == 0 else f"anybatch, rank {launch.rank}"
    words = (word if len(word) < LONGEST_WORD else f"{word[:100]}..." for word in message.split())
    print(f"{who}: {printable(' '.join(words))}", file=sys.stderr)
    return code


def short_traceback(error: BaseException) -> str:
    """Where a task's own code went wrong: its last frames, without ours and the import system's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_foreign(frame.filename)]
    lines = [*traceback.format_list(frames[-MOST_FRAMES:]), *traceback.format_exception_only(error)]
    return "Traceback (most recent call last):\n" + "".join(lines).rstrip()


def _is_of_a_task(error: BaseException) -> bool:
    return any(_is_foreign(frame.filename) for frame in traceback.extract_tb(error.__traceback__))


def _is_foreign(filename: str) -> bool:
    """True of a file that is neither ours, nor Python's, nor of an installed package."""
    return not filename.startswith(("<", *_NOT_THE_TASKS))


_PATHS = sysconfig.get_paths()
_NOT_THE_TASKS = (str(Path(__file__).parents[2]), _PATHS["stdlib"], _PATHS["purelib"], _PATHS["platlib"])
