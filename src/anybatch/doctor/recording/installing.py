"""Options of the recorder, and when it starts and stops. torch is loaded when the watch begins, not before."""

import atexit
import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anybatch.doctor.recording.event_log import EventLog

VARIABLE = "ANYBATCH_DOCTOR"
"""Environment variable that carries the options to every process of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Options of the recorder; 0 updates: do not end the script, 0 short_epochs: run whole epochs."""

    folder: str
    updates: int = 20
    short_epochs: int = 13

    def as_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}


class Ending(SystemExit):
    """Raised in the script after the last update to watch: a clean exit that no `except Exception` catches."""


def begin_watching(watch: Watch) -> "EventLog":
    """Patch torch; `end_watching` restores it."""
    from anybatch.doctor.recording.event_log import EventLog
    from anybatch.doctor.recording.watch_backward import BackwardWatch
    from anybatch.doctor.recording.watch_data import install_data_watch
    from anybatch.doctor.recording.watch_steps import install_step_watch

    log = EventLog(watch)
    install_step_watch(log)
    BackwardWatch(log)
    install_data_watch(log)
    return log


def end_watching(log: "EventLog", reason: str = "") -> None:
    """Restore torch and close the log."""
    log.patches.close()
    if not log.is_ended:
        log.close(reason or log.reason)


def watch_until_exit() -> None:
    """Watch this process with the options of its environment until it exits; torch must be loaded."""
    options = os.environ.get(VARIABLE)
    if not options:
        return
    log = begin_watching(Watch(**json.loads(options)))

    def leave() -> None:
        has_failed = getattr(sys, "last_value", None) is not None
        end_watching(log, "error" if has_failed and log.reason != "updates" else "")

    atexit.register(leave)


class TorchImported(importlib.abc.MetaPathFinder):
    """Import hook that runs `watch_until_exit` after the first `import torch`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        loader = None if spec is None else spec.loader
        if loader is not None:
            load = loader.exec_module

            def load_and_watch(module: ModuleType) -> None:
                del loader.exec_module
                load(module)
                watch_until_exit()

            loader.exec_module = load_and_watch  # type: ignore[method-assign]
        return spec
