"""The entry point: every error becomes one line on stderr and an exit code."""

import os
import sys
import traceback
from typing import NoReturn

from anybatch.errors import AnybatchError, NonFiniteError
from anybatch.faces import did_you_mean
from anybatch.training import find_launch

MOST_FRAMES = 4
"""How much of a task's own traceback is shown."""


def main() -> NoReturn:
    """Run the command line of this process and leave with its exit code."""
    # the profiler of torch writes lines about itself to stderr unless told not to, before it is loaded
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """The exit code of the command line `anybatch ARGUMENTS`."""
    try:
        from typer import Abort
        from typer.exceptions import TyperException

        from anybatch.cli.app import app
    except ModuleNotFoundError as error:
        return _fail(f"the command line needs {error.name}. Install it with: pip install 'anybatch[cli]'", 2)
    try:
        code = app(args=arguments, prog_name="anybatch", standalone_mode=False)
    except TyperException as error:
        return _fail(_with_nearest(error.format_message()) or "nothing to do; see anybatch --help.", error.exit_code)
    except Abort:
        return 1
    except AnybatchError as error:
        return _fail_of(error)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        return _fail(f"this needs {error.name}. Install it with: pip install 'anybatch[{extra}]'", 2)
    return code if isinstance(code, int) else 0


_EXTRAS = {
    "torchdata": "train",
    "sklearn": "train",
    "numpy": "train",
    "plotly": "report",
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
    from anybatch.training import TaskRaisedError

    code = 1 if isinstance(error, NonFiniteError) else 2
    if getattr(error, "is_told", False):  # rank 0 has said it
        return code
    if isinstance(error, TaskRaisedError) and error.__cause__ is not None:
        print(short_traceback(error.__cause__), file=sys.stderr)
    from anybatch.lessons import lesson_of_error, see

    return _fail(f"{error} {see(lesson_of_error(error))}", code)


def _fail(message: str, code: int) -> int:
    launch = find_launch()
    who = "anybatch" if launch is None or launch.rank == 0 else f"anybatch, rank {launch.rank}"
    print(f"{who}: {' '.join(message.split())}", file=sys.stderr)
    return code


def short_traceback(error: BaseException) -> str:
    """Where a task's own code went wrong: its last frames, without ours and the import system's."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and not frame.filename.endswith("lookup.py")
    ]
    lines = [*traceback.format_list(frames[-MOST_FRAMES:]), *traceback.format_exception_only(error)]
    return "Traceback (most recent call last):\n" + "".join(lines).rstrip()
