"""Find a task by name or file. Does not import torch before the task does."""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anybatch.display import did_you_mean
from anybatch.errors import TaskError

if TYPE_CHECKING:
    from anybatch.app.training.tasks.task import Task

BUILT_IN = {
    "textbook": "1,000 rows of 10 numbers, a small net: the gradient-accumulation example of every tutorial",
    "digits": "scikit-learn's handwritten digits, a convolutional net with BatchNorm",
    "stdlib": "a byte-level language model on the functions of Python's own standard library",
    "pairs": "docstring and body of the standard library's functions, a two-tower contrastive model",
}


class TaskRaisedError(TaskError):
    """An error raised by the task's own code, which is its cause."""


def check_task_exists(name: str) -> None:
    try:
        if name in BUILT_IN or Path(name).is_file():
            return
    except OSError:  # no file can have this name
        pass
    if name.endswith(".py") or "/" in name:
        raise TaskError(f"there is no task file {name}. Give the path of a Python file with a function task().")
    raise TaskError(
        f"there is no task {name!r}. Built in are {', '.join(BUILT_IN)}; or give the path of a Python file with a "
        f"function task(){did_you_mean(name, BUILT_IN) or '.'}"
    )


def find_task(name: str) -> Callable[[], "Task"]:
    """Return a function that builds the task. Set the seed before each call.

    A task file runs once, here. An error of its own code is raised as the cause of a `TaskRaisedError`.
    """
    check_task_exists(name)
    module = import_module(f"anybatch.app.training.tasks.{name}") if name in BUILT_IN else _run_file(Path(name))
    build = getattr(module, "task", None)
    if not callable(build):
        raise TaskError(
            f"{name} has no function task(). Define one that returns anybatch.Task(model=..., optimizer=..., "
            "objective=..., training=..., validation=...)."
        )

    def checked() -> "Task":
        from anybatch.app.training.tasks.task import Task

        try:
            built = build()
        except (Exception, SystemExit) as error:
            raise TaskRaisedError(f"task() of {name} raised {type(error).__name__}: {error}") from error
        if not isinstance(built, Task):
            raise TaskError(f"task() of {name} returned a {type(built).__name__}; expected an anybatch.Task.")
        return built

    return checked


def _run_file(path: Path) -> Any:
    module_name = f"anybatch_task_{path.stem}"
    spec = spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise TaskError(f"{path} is not a Python file. Give a file that ends in .py and has a function task().")
    module = sys.modules[module_name] = module_from_spec(spec)  # pickle looks up its classes here
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise TaskRaisedError(f"{path} raised {type(error).__name__} while it was loaded: {error}") from error
    return module
