"""Errors that anybatch raises on purpose, all derived from `AnybatchError`.

Each message names the value, what was expected, and the fix.
"""

import sys
from pathlib import Path

_OWN = Path(__file__).parent


def user_stacklevel() -> int:
    """Return the `stacklevel` for `warnings.warn` that points at the first line outside anybatch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and Path(frame.f_code.co_filename).is_relative_to(_OWN):
        level, frame = level + 1, frame.f_back
    return level


def first_line(error: BaseException) -> str:
    """Return the class and the first line of a message, cut at 200 characters.

    >>> first_line(ValueError("no rows\\nTraceback of a kernel"))
    'ValueError: no rows'
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


class AnybatchError(Exception):
    """Base class of all errors that anybatch raises.

    Catch it to handle any of them. Each subclass also derives from the built-in exception that fits, such as `ValueError`.

    >>> from anybatch import AnybatchError, Rows
    >>> try:
    ...     Rows(0)
    ... except AnybatchError as error:
    ...     print(type(error).__name__)
    SplitError
    """


class ArgumentsError(AnybatchError, TypeError):
    """Missing or unknown argument of `Update`, `Accumulator`, `plan` or `verify`. Use the spelling in the message."""


class BatchError(AnybatchError, ValueError):
    """Batch with rows that cannot be counted, indexed or split, such as fields of different lengths. Fix the named field."""


class SplitError(AnybatchError, ValueError):
    """Micro-batch size or split that cannot cut the batch, such as a token budget below the longest row. Change the size."""


class UnitsError(AnybatchError, ValueError):
    """Unknown or invalid number of units that a mean loss divides by. Pass `units=`, a function of the batch."""


class LossError(AnybatchError, ValueError):
    """Objective that does not return one differentiable number. Return a scalar tensor with a graph."""


class DropoutError(AnybatchError, RuntimeError):
    """Dropout with masks that would depend on the split. Use `nn.Dropout` modules, or set the named `p` to 0."""


class LockstepError(AnybatchError, RuntimeError):
    """Micro-batches that reach different BatchNorm layers under `batch_norm="exact"`.

    Make the forward pass call the same layers in the same order for every micro-batch.
    """


class WindowError(AnybatchError, RuntimeError):
    """`Window` used out of order, or broken by a backward pass that failed inside it.

    Open a new window for every update, and let errors leave the block.
    """


class ParallelError(AnybatchError, RuntimeError):
    """Model wrapped for several ranks in a way that is not exact, or another rank that failed.

    Wrap the model as the message says, or read the output of the other rank.
    """


class MemoryLimitError(AnybatchError, MemoryError):
    """Out of memory with nothing left to make smaller: at a single row, or in the optimizer's step.

    Gradients, buffers and random state are restored where the message says so. Use shorter rows, autocast or checkpointing.
    """


class UpdateError(AnybatchError, ValueError):
    """Parts or options of an `Update` that do not fit together. Change the option that the message names."""


class PlanError(AnybatchError, ValueError):
    """Update with memory that cannot be predicted. Measure it on the device instead, or change the named option."""


class VerifyError(AnybatchError, ValueError):
    """Model, objective or batch that cannot be verified, such as a batch of one row. Pass one that can be split."""


class ExactnessError(AnybatchError, ArithmeticError):
    """Accumulated gradient that differs from that of the whole batch; no step was made. The message has cause and fix."""


class NonFiniteError(AnybatchError, ArithmeticError):
    """Gradient or loss that is inf or nan; no step was made. Fix the named micro-batch, or use `on_nonfinite="drop"`."""


class TaskError(AnybatchError, ValueError):
    """Task of `anybatch train` that does not exist or is incomplete. Define `task()` as the message says."""


class SettingsError(AnybatchError, ValueError):
    """Invalid setting of a command or a training run. Give a value that the message lists."""


class CheckpointError(AnybatchError, ValueError):
    """Checkpoint that cannot be written or read, or belongs to another model. Resume with the model that saved it."""


class DoctorError(AnybatchError, ValueError):
    """Script that the doctor cannot watch, or a training loop with errors; the message is then the report."""


class RunError(AnybatchError, ValueError):
    """Folder that holds no run, holds one of another kind, or cannot be written to. Give another folder."""


class LessonError(AnybatchError, ValueError):
    """Unknown lesson of `anybatch learn`. The message lists the lessons."""
