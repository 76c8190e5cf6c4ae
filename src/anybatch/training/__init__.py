"""The loop behind `anybatch train`: tasks, settings, checkpoints, ranks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anybatch.training.checkpoints import Resumed, resume, save, seed_all
    from anybatch.training.experiment import (
        Experiment,
        RunPlan,
        assemble,
        find_device,
        find_split,
        make_plan,
        num_inexact_norms,
    )
    from anybatch.training.launch import Launch, check_alone, find_launch, from_first_rank, joined_ranks, ranks_of_group
    from anybatch.training.learning_rates import ADAMS, Scaling, scale_lr, warmup
    from anybatch.training.loaders import (
        all_batches,
        first_batch,
        training_loader,
        validation_batches,
        validation_loader,
    )
    from anybatch.training.loop import MEMORY_AT, Loop, Progress, judging_number, validate
    from anybatch.training.measure import observed, profiled
    from anybatch.training.settings import Decay, LRRule, MemoryLimit, Parallel, Precision, Settings, parse_micro_batch
    from anybatch.training.tasks import BUILT_IN, Task, TaskRaisedError, check_task_exists, find_task

__all__ = [
    "ADAMS",
    "BUILT_IN",
    "Decay",
    "Experiment",
    "LRRule",
    "Launch",
    "Loop",
    "MEMORY_AT",
    "MemoryLimit",
    "Parallel",
    "Precision",
    "Progress",
    "Resumed",
    "RunPlan",
    "Scaling",
    "Settings",
    "Task",
    "TaskRaisedError",
    "all_batches",
    "assemble",
    "check_alone",
    "check_task_exists",
    "find_device",
    "find_launch",
    "find_split",
    "find_task",
    "first_batch",
    "from_first_rank",
    "joined_ranks",
    "judging_number",
    "make_plan",
    "num_inexact_norms",
    "observed",
    "parse_micro_batch",
    "profiled",
    "ranks_of_group",
    "resume",
    "save",
    "scale_lr",
    "seed_all",
    "training_loader",
    "validate",
    "validation_batches",
    "validation_loader",
    "warmup",
]
_MODULES = {
    "checkpoints": (
        "Resumed",
        "resume",
        "save",
        "seed_all",
    ),
    "experiment": (
        "Experiment",
        "RunPlan",
        "assemble",
        "find_device",
        "find_split",
        "make_plan",
        "num_inexact_norms",
    ),
    "launch": (
        "Launch",
        "check_alone",
        "find_launch",
        "from_first_rank",
        "joined_ranks",
        "ranks_of_group",
    ),
    "learning_rates": (
        "ADAMS",
        "Scaling",
        "scale_lr",
        "warmup",
    ),
    "loaders": (
        "all_batches",
        "first_batch",
        "training_loader",
        "validation_batches",
        "validation_loader",
    ),
    "loop": (
        "MEMORY_AT",
        "Loop",
        "Progress",
        "judging_number",
        "validate",
    ),
    "measure": (
        "observed",
        "profiled",
    ),
    "settings": (
        "Decay",
        "LRRule",
        "MemoryLimit",
        "Parallel",
        "Precision",
        "Settings",
        "parse_micro_batch",
    ),
    "tasks": (
        "BUILT_IN",
        "Task",
        "TaskRaisedError",
        "check_task_exists",
        "find_task",
    ),
}
"""The names of each module, which is loaded when one of them is first asked for: most of them load torch."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        for module, names in _MODULES.items():
            if name in names:
                return getattr(import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
