"""Train with the batch you want, on the memory you have, and get exactly that batch's gradient.

`__all__` has the names that a user has to know; every other name of `_MODULES` can be imported too. Each module is loaded when
one of its names is first asked for, so that `import anybatch` and `anybatch --help` do not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anybatch import stages as stages
    from anybatch.batches import Auto as Auto
    from anybatch.batches import Batch as Batch
    from anybatch.batches import Choice as Choice
    from anybatch.batches import Cost as Cost
    from anybatch.batches import Dealt as Dealt
    from anybatch.batches import GlobalBatches, Rows, SampleList, Tokens, windows
    from anybatch.batches import MicroBatches as MicroBatches
    from anybatch.batches import Split as Split
    from anybatch.batches import Stacked as Stacked
    from anybatch.batches import Windows as Windows
    from anybatch.batches import num_rows as num_rows
    from anybatch.batches import repeated_rows as repeated_rows
    from anybatch.batches import rows as rows
    from anybatch.batches import take_rows as take_rows
    from anybatch.doctor import Diagnosis as Diagnosis
    from anybatch.doctor import Doctor
    from anybatch.doctor import Finding as Finding
    from anybatch.dropout import row_dropout
    from anybatch.errors import AnybatchError
    from anybatch.errors import ArgumentsError as ArgumentsError
    from anybatch.errors import BatchError as BatchError
    from anybatch.errors import CheckpointError as CheckpointError
    from anybatch.errors import DoctorError as DoctorError
    from anybatch.errors import DropoutError as DropoutError
    from anybatch.errors import ExactnessError as ExactnessError
    from anybatch.errors import LessonError as LessonError
    from anybatch.errors import LockstepError as LockstepError
    from anybatch.errors import LossError as LossError
    from anybatch.errors import MemoryLimitError as MemoryLimitError
    from anybatch.errors import NonFiniteError as NonFiniteError
    from anybatch.errors import ParallelError as ParallelError
    from anybatch.errors import PlanError as PlanError
    from anybatch.errors import RunError as RunError
    from anybatch.errors import SettingsError as SettingsError
    from anybatch.errors import SplitError as SplitError
    from anybatch.errors import TaskError as TaskError
    from anybatch.errors import UnitsError as UnitsError
    from anybatch.errors import UpdateError as UpdateError
    from anybatch.errors import VerifyError as VerifyError
    from anybatch.errors import WindowError as WindowError
    from anybatch.gradients import Window
    from anybatch.memory import Breakdown as Breakdown
    from anybatch.memory import Checkpointing as Checkpointing
    from anybatch.memory import Fit, plan
    from anybatch.memory import Fitted as Fitted
    from anybatch.memory import Plan as Plan
    from anybatch.memory import SizePeak as SizePeak
    from anybatch.memory import measure_peak as measure_peak
    from anybatch.noise import NoiseScale as NoiseScale
    from anybatch.objectives import (
        Coupled,
        Mean,
        Objective,
        PerRow,
        Sum,
        Terms,
        huggingface,
        info_nce,
        observed,
        supervised,
    )
    from anybatch.objectives import InfoNCE as InfoNCE
    from anybatch.objectives import clip_loss as clip_loss
    from anybatch.objectives import sentence_transformers as sentence_transformers
    from anybatch.parallel import Ranks as Ranks
    from anybatch.passes import Accumulated as Accumulated
    from anybatch.passes import Accumulator
    from anybatch.proof import Cause as Cause
    from anybatch.proof import CutResult as CutResult
    from anybatch.proof import ParameterDeviation as ParameterDeviation
    from anybatch.proof import ParameterError as ParameterError
    from anybatch.proof import Verdict as Verdict
    from anybatch.proof import verify
    from anybatch.training import Resumed as Resumed
    from anybatch.training import Scaling as Scaling
    from anybatch.training import Task as Task
    from anybatch.training import resume, save
    from anybatch.training import scale_lr as scale_lr
    from anybatch.training import warmup as warmup
    from anybatch.update import Update
    from anybatch.update import UpdateResult as UpdateResult

__version__ = "0.2.0"
__all__ = [
    "Accumulator",
    "AnybatchError",
    "Coupled",
    "Doctor",
    "Fit",
    "GlobalBatches",
    "Mean",
    "Objective",
    "PerRow",
    "Rows",
    "SampleList",
    "Sum",
    "Terms",
    "Tokens",
    "Update",
    "Window",
    "huggingface",
    "info_nce",
    "observed",
    "plan",
    "resume",
    "row_dropout",
    "save",
    "supervised",
    "verify",
    "windows",
]
_MODULES: dict[str, tuple[str, ...]] = {
    "anybatch.batches": (
        "Auto",
        "Batch",
        "Choice",
        "Cost",
        "Dealt",
        "GlobalBatches",
        "MicroBatches",
        "Rows",
        "SampleList",
        "Split",
        "Stacked",
        "Tokens",
        "Windows",
        "num_rows",
        "repeated_rows",
        "rows",
        "take_rows",
        "windows",
    ),
    "anybatch.doctor": ("Diagnosis", "Doctor", "Finding"),
    "anybatch.dropout": ("row_dropout",),
    "anybatch.errors": (
        "AnybatchError",
        "ArgumentsError",
        "BatchError",
        "CheckpointError",
        "DoctorError",
        "DropoutError",
        "ExactnessError",
        "LessonError",
        "LockstepError",
        "LossError",
        "MemoryLimitError",
        "NonFiniteError",
        "ParallelError",
        "PlanError",
        "RunError",
        "SettingsError",
        "SplitError",
        "TaskError",
        "UnitsError",
        "UpdateError",
        "VerifyError",
        "WindowError",
    ),
    "anybatch.gradients": ("Window",),
    "anybatch.memory": ("Breakdown", "Checkpointing", "Fit", "Fitted", "Plan", "SizePeak", "measure_peak", "plan"),
    "anybatch.noise": ("NoiseScale",),
    "anybatch.objectives": (
        "Coupled",
        "InfoNCE",
        "Mean",
        "Objective",
        "PerRow",
        "Sum",
        "Terms",
        "clip_loss",
        "huggingface",
        "info_nce",
        "observed",
        "sentence_transformers",
        "supervised",
    ),
    "anybatch.parallel": ("Ranks",),
    "anybatch.passes": ("Accumulated", "Accumulator"),
    "anybatch.proof": ("Cause", "CutResult", "ParameterDeviation", "ParameterError", "Verdict", "verify"),
    "anybatch.training": ("Resumed", "Scaling", "Task", "resume", "save", "scale_lr", "warmup"),
    "anybatch.update": ("Update", "UpdateResult"),
}
"""The names of each module: the same as above, for Python itself."""
_REMOVED = {
    "ProgressBar": "Wrap the loader in a bar of your own, such as tqdm(loader), and show result.loss in it.",
    "TensorBoardLogger": "Write what result.scalars() gives with a SummaryWriter of your own, in Update(..., on_update=...).",
}
"""Names that are gone, with what to use instead."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "stages":
            return import_module("anybatch.stages")
        if name in _REMOVED:
            raise ImportError(f"anybatch has no {name!r} any more. {_REMOVED[name]}", name=__name__)
        for module, names in _MODULES.items():
            if name in names:
                value = globals()[name] = getattr(import_module(module), name)
                return value
        if name.startswith("__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from anybatch.faces import did_you_mean

        known = [known for known in __dir__() if not known.startswith("__")]
        hint = did_you_mean(name, known) or "."
        raise AttributeError(f"anybatch has no {name!r}; it has {', '.join(known)}{hint}")


def __dir__() -> list[str]:
    return sorted([*(name for names in _MODULES.values() for name in names), "stages", "__version__"])
