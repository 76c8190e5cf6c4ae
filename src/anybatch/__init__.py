"""Train with the batch you want, on the memory you have, and get exactly that batch's gradient.

`__all__` lists the names to know; every other name of `_HOMES` can be imported too. A package is loaded when one of its names
is first used, so that `import anybatch` and `anybatch --help` do not load torch. `__init__.pyi` lists the same names for type
checkers.
"""

from importlib import import_module
from typing import Any

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
    "UpdateOptions",
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
_HOMES = {
    "core": (
        "Accumulated Accumulator Batch Coupled Dealt Mean MicroBatches Objective PerRow Ranks Rows SampleList "
        "Split Stacked Sum Update UpdateOptions UpdateResult Window Windows num_rows rows supervised take_rows windows"
    ),
    "ragged": "Auto Choice Cost Tokens",
    "parallel": "GlobalBatches repeated_rows",
    "objectives": "InfoNCE Terms clip_loss huggingface info_nce observed sentence_transformers",
    "dropout": "row_dropout",
    "noise": "NoiseScale",
    "memory": "Breakdown Checkpointing Fit Fitted Plan SizePeak measure_peak plan",
    "verification": "Cause CutResult ParameterDeviation ParameterError Verdict verify",
    "doctor": "Diagnosis Doctor Finding",
    "app.training.checkpoints": "Resumed resume save",
    "app.training.learning_rates": "Scaling scale_lr warmup",
    "app.training.tasks.task": "Task",
    "errors": (
        "AnybatchError ArgumentsError BatchError CheckpointError DoctorError DropoutError ExactnessError "
        "LessonError LockstepError LossError MemoryLimitError NonFiniteError ParallelError PlanError RunError "
        "SettingsError SplitError TaskError UnitsError UpdateError VerifyError WindowError"
    ),
}
_HOME = {name: f"anybatch.{home}" for home, names in _HOMES.items() for name in names.split()}
_REMOVED = {
    "ProgressBar": "Wrap the loader in a bar of your own, such as tqdm(loader), and show result.loss in it.",
    "TensorBoardLogger": "Write what result.scalars() gives with a SummaryWriter of your own, in Update(..., on_update=...).",
}
"""Removed names, with their replacements."""


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    elif name == "stages":
        value = import_module("anybatch.core.events")
    elif name in _REMOVED:
        raise ImportError(f"anybatch has no {name!r} any more. {_REMOVED[name]}", name=__name__)
    elif name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    else:
        from anybatch.display import did_you_mean

        known = [known for known in __dir__() if not known.startswith("__")]
        hint = did_you_mean(name, known) or "."
        raise AttributeError(f"anybatch has no {name!r}; it has {', '.join(known)}{hint}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_HOME, "stages", "__version__"])
