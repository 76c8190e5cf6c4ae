"""Entry point of `anybatch`: run a command, and turn every error into one line on stderr and an exit code."""

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

MAX_FRAMES = 4
"""Frames of a task's own traceback that are shown."""
LONGEST_WORD = 300
"""Longer words are cut in messages."""
_EXTRAS = dict.fromkeys(("torchdata", "sklearn", "numpy"), "train")
_EXTRAS |= {"jinja2": "report", "rich": "cli", "tensorboard": "tensorboard"}
_PATHS = sysconfig.get_paths()
_INSTALLED = ("<", str(Path(__file__).parents[2]), _PATHS["stdlib"], _PATHS["purelib"], _PATHS["platlib"])


def main() -> NoReturn:
    """Run the command line of this process and exit with its code."""
    # torch's profiler logs to stderr unless this is set before torch is loaded
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if find_launch() is None:  # with several ranks, torch's messages about collectives stay visible
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run `anybatch ARGUMENTS` and return its exit code."""
    try:
        from anybatch.app.cli.app import app
    except ModuleNotFoundError as error:
        return _fail(f"the command line needs {error.name}. Install it with: pip install 'anybatch[cli]'", 2)
    refusal = _removed(arguments) or _empty_argument(arguments)
    if refusal is not None:
        return _fail(refusal, 2)
    try:
        code = app(args=arguments, prog_name="anybatch", standalone_mode=False)
    except SystemExit as error:
        if not _task_frames(error):
            raise
        return _fail(
            f"a task's own code called sys.exit({error.code!r}), so that what was asked for did not happen.", 2
        )
    except Exception as error:
        return _fail_with(error)
    return code if isinstance(code, int) else 0


def _removed(arguments: list[str]) -> str | None:
    """Return the message for a command or an option that earlier versions had."""
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
                "docs/benchmarks/scale.md has its formulas and tables, and benchmarks/scale_model.py the model."
            )
    return None


def _empty_argument(arguments: list[str]) -> str | None:
    """Return the message for an empty argument. `doctor` is exempt: the script it runs may take one."""
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if arguments[0] != "doctor" and (argument == "" or (argument.startswith("--") and argument.endswith("="))):
            name = argument[:-1] or (before if before.startswith("-") else "an argument")
            return f"{name} is empty: give it a value, or leave it out."
    return None


def _fail_with(error: Exception) -> int:
    """Print an error, in one line if it is a known one, and return the exit code."""
    from typer import Abort
    from typer.exceptions import TyperException

    if isinstance(error, TyperException):
        return _fail(_with_nearest(error.format_message()) or "nothing to do; see anybatch --help.", error.exit_code)
    if isinstance(error, Abort):
        return 1
    if isinstance(error, AnybatchError):
        return _fail_with_lesson(error)
    name = (getattr(error, "name", None) or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and name in _EXTRAS:
        return _fail(f"this needs {error.name}. Install it with: pip install 'anybatch[{_EXTRAS[name]}]'", 2)
    if _task_frames(error):
        _print_task_traceback(error)
        return _fail(f"the task's own code raised {first_line(error)}", 2)
    if isinstance(error, OSError):
        return _fail(f"{first_line(error)}. Look at the disk and at the folder; what was saved before is whole.", 2)
    traceback.print_exception(error)
    return _fail(first_line(error), 2)


def _with_nearest(message: str) -> str:
    """Join the parser's message into one line; if it lists the values of an option, add the nearest one."""
    text = " ".join(message.split())
    given, _, known = text.partition(" is not one of ")
    if not known:
        return text
    return text.removesuffix(".") + (did_you_mean(given.split("'")[-2], known.split("'")[1::2]) or ".")


def _fail_with_lesson(error: AnybatchError) -> int:
    from anybatch.app.lessons.pages.see_lessons import lesson_of_error, see
    from anybatch.app.training.tasks.lookup import TaskRaisedError

    code = 1 if isinstance(error, NonFiniteError) else 2
    if getattr(error, "is_told", False):  # rank 0 has printed it
        return code
    if isinstance(error, TaskRaisedError) and error.__cause__ is not None:
        _print_task_traceback(error.__cause__)
    ended = "" if str(error).endswith((".", "?", "!")) else "."
    return _fail(f"{error}{ended} {see(lesson_of_error(error))}", code)


def _fail(message: str, code: int) -> int:
    launch = find_launch()
    who = "anybatch" if launch is None or launch.rank == 0 else f"anybatch, rank {launch.rank}"
    words = (word if len(word) < LONGEST_WORD else f"{word[:100]}..." for word in message.split())
    print(f"{who}: {printable(' '.join(words))}", file=sys.stderr)
    return code


def _print_task_traceback(error: BaseException) -> None:
    lines = [*traceback.format_list(_task_frames(error)[-MAX_FRAMES:]), *traceback.format_exception_only(error)]
    print("Traceback (most recent call last):\n" + "".join(lines).rstrip(), file=sys.stderr)


def _task_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames that belong neither to anybatch, nor to Python, nor to an installed package."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith(_INSTALLED)]
