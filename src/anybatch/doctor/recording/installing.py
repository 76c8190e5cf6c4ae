"""Beginning and ending to watch a process, and the hook that begins as soon as torch is imported."""

import atexit
import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from anybatch.doctor.recording.watch import VARIABLE, Watch

if TYPE_CHECKING:
    from anybatch.doctor.recording.event_log import EventLog


def begin_watching(watch: Watch) -> "EventLog":
    """Patch torch; `end_watching` puts everything back."""
    from anybatch.doctor.recording.event_log import EventLog
    from anybatch.doctor.recording.watch_backward import BackwardWatch, ReadingWatch
    from anybatch.doctor.recording.watch_data import install_data_watch
    from anybatch.doctor.recording.watch_steps import install_step_watch

    log = EventLog(watch)
    install_step_watch(log)
    BackwardWatch(log, ReadingWatch(log))
    install_data_watch(log)
    return log


def end_watching(log: "EventLog", reason: str = "") -> None:
    """The log is closed and torch is as it was."""
    log.patches.undo()
    if not log.is_ended:
        log.close(reason or log.reason)


def watch_until_exit() -> None:
    """Watch this process as its environment says, until it exits; called once torch is loaded."""
    options = os.environ.get(VARIABLE)
    if not options:
        return
    log = begin_watching(Watch(**json.loads(options)))

    def leave() -> None:
        failed = getattr(sys, "last_value", None)
        end_watching(log, "error" if failed is not None and log.reason != "updates" else "")

    atexit.register(leave)


class TorchImported(importlib.abc.MetaPathFinder):
    """Runs `watch_until_exit` when `import torch` has ended, and steps aside."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """torch's own specification, with a loader that calls us last."""
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _WatchingLoader(spec.loader)
        return spec


class _WatchingLoader(importlib.abc.Loader):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        watch_until_exit()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
