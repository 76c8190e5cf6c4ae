"""Scripts run under watch, each in a fork of a process that has torch loaded."""

import random
import re
import runpy
import sys
import traceback
import warnings
from pathlib import Path

from anybatch.doctor import Diagnosis, judge_folder
from tests.processes.forked import Completed, run_function

ZOO = Path(__file__).parent / "zoo"
MARK = re.compile(r"# <- (\S+)")


def planted(script: Path) -> set[tuple[str, int]]:
    """The kinds that a script is marked with, and their lines."""
    lines = enumerate(script.read_text().splitlines(), start=1)
    return {(found[1], number) for number, line in lines if (found := MARK.search(line))}


def watch_script(script: str, folder: str, updates: int, short_epochs: int) -> int:
    """Called in the fork: the exit code of the script; what it raised is told as Python tells it."""
    from anybatch.doctor.recording import Watch, begin_watching, end_watching

    warnings.simplefilter("ignore")
    log = begin_watching(Watch(folder=folder, updates=updates, short_epochs=short_epochs))
    code, reason = 0, ""
    try:
        run_script(script)
    except SystemExit as ending:
        code = int(ending.code or 0)
    except Exception:
        traceback.print_exc()
        code, reason = 1, "error"
    end_watching(log, reason)
    return code


def run_script(script: str) -> None:
    random.seed(0)
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


def diagnose(script: Path, folder: Path, *, updates: int = 20, short_epochs: int = 13) -> tuple[Completed, Diagnosis]:
    """A script's own outcome, and what the doctor says."""
    done = run_function(watch_script, str(script), str(folder), updates, short_epochs)
    return done, judge_folder(folder)
