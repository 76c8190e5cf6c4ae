"""Train with the batch you want, on the memory you have, and get exactly that batch's gradient.

`__all__` has the names that a user has to know; every other name of `_MODULES` can be imported too. Each module is loaded when
one of its names is first asked for, so that `import anybatch` and `anybatch --help` do not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anybatch import stages as stages
    from anybatch.app.training.checkpoints.saving import Resumed, resume, save
    from anybatch.app.training.learning_rates import Scaling, scale_lr, warmup
    from anybatch.app.training.tasks.task import Task
    from anybatch.core import (
        Accumulated,
        Accumulator,
        Batch,
        Coupled,
        Dealt,
        Mean,
        MicroBatches,
        Objective,
        PerRow,
        Ranks,
        Rows,
        SampleList,
        Split,
        Stacked,
        Sum,
        Update,
        UpdateResult,
        Window,
        Windows,
        num_rows,
        rows,
        supervised,
        take_rows,
        windows,
    )
    from anybatch.doctor import Diagnosis, Doctor, Finding
    from anybatch.dropout import row_dropout
    from anybatch.errors import (
        AnybatchError,
        ArgumentsError,
        BatchError,
        CheckpointError,
        DoctorError,
        DropoutError,
        ExactnessError,
        LessonError,
        LockstepError,
        LossError,
        MemoryLimitError,
        NonFiniteError,
        ParallelError,
        PlanError,
        RunError,
        SettingsError,
        SplitError,
        TaskError,
        UnitsError,
        UpdateError,
        VerifyError,
        WindowError,
    )
    from anybatch.memory import Breakdown, Checkpointing, Fit, Fitted, Plan, SizePeak, measure_peak, plan
    from anybatch.noise import NoiseScale
    from anybatch.objectives import InfoNCE, Terms, clip_loss, huggingface, info_nce, observed, sentence_transformers
    from anybatch.parallel import GlobalBatches, repeated_rows
    from anybatch.ragged import Auto, Choice, Cost, Tokens
    from anybatch.verification import Cause, CutResult, ParameterDeviation, ParameterError, Verdict, verify

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
    "anybatch.verification": ("Cause", "CutResult", "ParameterDeviation", "ParameterError", "Verdict", "verify"),
    "anybatch.app.training": ("Resumed", "Scaling", "Task", "resume", "save", "scale_lr", "warmup"),
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
        from anybatch.core import did_you_mean

        known = [known for known in __dir__() if not known.startswith("__")]
        hint = did_you_mean(name, known) or "."
        raise AttributeError(f"anybatch has no {name!r}; it has {', '.join(known)}{hint}")


def __dir__() -> list[str]:
    return sorted([*(name for names in _MODULES.values() for name in names), "stages", "__version__"])
