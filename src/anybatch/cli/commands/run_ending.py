"""How a training run ended when it did not end by itself: its `run.json` and its page say so."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from anybatch.cli.folders import write_page
from anybatch.errors import NonFiniteError, first_line
from anybatch.records import Run, RunFolder


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
