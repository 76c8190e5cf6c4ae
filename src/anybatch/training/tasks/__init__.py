"""Tasks: what is trained, on what. Four are built in."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anybatch.training.tasks.lookup import BUILT_IN, TaskRaisedError, check_task_exists, find_task
    from anybatch.training.tasks.task import Task

__all__ = [
    "BUILT_IN",
    "Task",
    "TaskRaisedError",
    "check_task_exists",
    "find_task",
]
_MODULES = {
    "lookup": (
        "BUILT_IN",
        "TaskRaisedError",
        "check_task_exists",
        "find_task",
    ),
    "task": ("Task",),
}
"""The names of each module, which is loaded when one of them is first asked for: most of them load torch."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        for module, names in _MODULES.items():
            if name in names:
                return getattr(import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
