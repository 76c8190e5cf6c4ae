"""Tasks: what is trained, on what. Four are built in."""

from typing import TYPE_CHECKING

from anybatch.lazy import lazily

if TYPE_CHECKING:
    from anybatch.training.tasks.lookup import BUILT_IN, TaskRaisedError, check_task_exists, find_task
    from anybatch.training.tasks.task import Task
else:
    __getattr__ = lazily(__name__)

__all__ = [
    "BUILT_IN",
    "Task",
    "TaskRaisedError",
    "check_task_exists",
    "find_task",
]
