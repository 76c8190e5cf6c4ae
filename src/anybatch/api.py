"""The whole public API, by name; `anybatch` itself hands these out on first use."""

import anybatch.stages as stages
from anybatch.batches import Batch, MicroBatches, Rows, Split, Windows, num_rows, rows, take_rows, windows
from anybatch.errors import (
    AnybatchError,
    BatchError,
    CheckpointError,
    LossError,
    NonFiniteError,
    RunError,
    SettingsError,
    SplitError,
    TaskError,
    UnitsError,
    UpdateError,
    WindowError,
)
from anybatch.gradients import Accumulated, Accumulator, Mean, Objective, Sum, Window, huggingface, supervised
from anybatch.training.checkpoints import Resumed, resume, save
from anybatch.training.schedules import Scaling, scale_lr, warmup
from anybatch.training.task import Task
from anybatch.update import Update, UpdateResult

__all__ = [
    "Accumulated",
    "Accumulator",
    "AnybatchError",
    "Batch",
    "BatchError",
    "CheckpointError",
    "LossError",
    "Mean",
    "MicroBatches",
    "NonFiniteError",
    "Objective",
    "Resumed",
    "Rows",
    "RunError",
    "Scaling",
    "SettingsError",
    "Split",
    "SplitError",
    "Sum",
    "Task",
    "TaskError",
    "UnitsError",
    "Update",
    "UpdateError",
    "UpdateResult",
    "Window",
    "WindowError",
    "Windows",
    "huggingface",
    "num_rows",
    "resume",
    "rows",
    "save",
    "scale_lr",
    "stages",
    "supervised",
    "take_rows",
    "warmup",
    "windows",
]
