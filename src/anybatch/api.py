"""The whole public API, by name; `anybatch` itself hands these out on first use."""

import anybatch.stages as stages
from anybatch.batches import Batch, MicroBatches, Rows, Split, Windows, num_rows, rows, take_rows, windows
from anybatch.errors import (
    AnybatchError,
    BatchError,
    LossError,
    NonFiniteError,
    SplitError,
    UnitsError,
    UpdateError,
    WindowError,
)
from anybatch.gradients import Accumulated, Accumulator, Mean, Objective, Sum, Window, huggingface, supervised
from anybatch.update import Update, UpdateResult

__all__ = [
    "Accumulated",
    "Accumulator",
    "AnybatchError",
    "Batch",
    "BatchError",
    "LossError",
    "Mean",
    "MicroBatches",
    "NonFiniteError",
    "Objective",
    "Rows",
    "Split",
    "SplitError",
    "Sum",
    "UnitsError",
    "Update",
    "UpdateError",
    "UpdateResult",
    "Window",
    "WindowError",
    "Windows",
    "huggingface",
    "num_rows",
    "rows",
    "stages",
    "supervised",
    "take_rows",
    "windows",
]
