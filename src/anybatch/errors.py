"""Every error that anybatch raises on purpose.

AnybatchError
├── BatchError       a batch whose rows cannot be counted or taken
├── SplitError       a micro-batch size or split that cannot cut the batch
├── UnitsError       what a mean loss divides by is not known, or makes no sense
├── LossError        an objective returned something that is not one differentiable number
├── DropoutError     dropout whose masks would depend on the cut
├── LockstepError    micro-batches that were to meet at a layer came to different ones
├── WindowError      a window used out of order, or torn by a backward pass that died
├── ParallelError    a model wrapped for many ranks in a way that would not be exact, or ranks that failed
├── MemoryLimitError memory ran out where nothing could be made smaller
├── ArgumentsError   an argument that is missing, or that there is none of
├── UpdateError      an `Update` that was put together from parts that do not fit
├── PlanError        an update whose memory cannot be predicted
├── VerifyError      something that cannot be verified: no copy, no second row
├── ExactnessError   the self-check of an `Update` found a gradient that is not the whole batch's
├── NonFiniteError   a gradient or a loss is inf or nan
├── TaskError        a task that is not there, or is not one
├── SettingsError    a setting of a training run that makes no sense
├── CheckpointError  a checkpoint that cannot be read, or is of something else
├── DoctorError      a script that cannot be watched, or a loop in which the doctor found errors
├── RunError         a folder that is no run, or is one of another kind
└── LessonError      a lesson that is not there

Each message names the value, what was expected, and the fix.
"""

import sys
from pathlib import Path

_OWN = Path(__file__).parent


def user_stacklevel() -> int:
    """How far up from the caller of this the first line is that is not ours: whose update it is, for `warnings.warn`."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and Path(frame.f_code.co_filename).is_relative_to(_OWN):
        level, frame = level + 1, frame.f_back
    return level


def first_line(error: BaseException) -> str:
    """What an error says, in one short line, with its kind: messages of others may run over pages.

    >>> first_line(ValueError("no rows\\nTraceback of a kernel"))
    'ValueError: no rows'
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


class AnybatchError(Exception):
    """Base of all errors raised by anybatch."""


class ArgumentsError(AnybatchError, TypeError):
    """An argument that is missing, or that there is none of."""


class BatchError(AnybatchError, ValueError):
    """A batch whose rows cannot be counted or taken."""


class SplitError(AnybatchError, ValueError):
    """A micro-batch size or split that cannot cut the batch."""


class UnitsError(AnybatchError, ValueError):
    """What a mean loss divides by is not known, or makes no sense."""


class LossError(AnybatchError, ValueError):
    """An objective returned something that is not one differentiable number."""


class DropoutError(AnybatchError, RuntimeError):
    """Dropout whose masks would depend on the cut."""


class LockstepError(AnybatchError, RuntimeError):
    """Micro-batches that were to meet at a layer came to different ones."""


class WindowError(AnybatchError, RuntimeError):
    """A window used out of order, or torn by a backward pass that died."""


class ParallelError(AnybatchError, RuntimeError):
    """A model wrapped for many ranks in a way that would not be exact, or another rank that failed."""


class MemoryLimitError(AnybatchError, MemoryError):
    """Memory ran out where nothing could be made smaller: at a single row, or in the optimizer's step."""


class UpdateError(AnybatchError, ValueError):
    """An `Update` that was put together from parts that do not fit."""


class PlanError(AnybatchError, ValueError):
    """An update whose memory cannot be predicted."""


class VerifyError(AnybatchError, ValueError):
    """Something that cannot be verified."""


class ExactnessError(AnybatchError, ArithmeticError):
    """The accumulated gradient is not the whole batch's; the message is the verdict, with the cause."""


class NonFiniteError(AnybatchError, ArithmeticError):
    """A gradient or a loss is inf or nan; nothing was stepped."""


class TaskError(AnybatchError, ValueError):
    """A task that is not there, or is not one."""


class SettingsError(AnybatchError, ValueError):
    """A setting of a training run that makes no sense."""


class CheckpointError(AnybatchError, ValueError):
    """A checkpoint that cannot be read, or is of something else."""


class DoctorError(AnybatchError, ValueError):
    """A script that cannot be watched, or a training loop in which the doctor found errors; the message is the report."""


class RunError(AnybatchError, ValueError):
    """A folder that is no run, or is one of another kind."""


class LessonError(AnybatchError, ValueError):
    """A lesson that is not there."""
