"""Types of the names that `__init__.py` loads on first use."""

# ruff: noqa: I001  (one statement per package)
from anybatch.app.training.checkpoints import (
    Resumed as Resumed,
    resume as resume,
    save as save,
)
from anybatch.app.training.learning_rates import (
    Scaling as Scaling,
    scale_lr as scale_lr,
    warmup as warmup,
)
from anybatch.app.training.tasks.task import (
    Task as Task,
)
from anybatch.core import (
    Accumulated as Accumulated,
    Accumulator as Accumulator,
    Batch as Batch,
    Coupled as Coupled,
    Dealt as Dealt,
    Mean as Mean,
    MicroBatches as MicroBatches,
    Objective as Objective,
    PerRow as PerRow,
    Ranks as Ranks,
    Rows as Rows,
    SampleList as SampleList,
    Split as Split,
    Stacked as Stacked,
    Sum as Sum,
    Update as Update,
    UpdateOptions as UpdateOptions,
    UpdateResult as UpdateResult,
    Window as Window,
    Windows as Windows,
    num_rows as num_rows,
    rows as rows,
    supervised as supervised,
    take_rows as take_rows,
    windows as windows,
)
from anybatch.doctor import (
    Diagnosis as Diagnosis,
    Doctor as Doctor,
    Finding as Finding,
)
from anybatch.dropout import (
    row_dropout as row_dropout,
)
from anybatch.errors import (
    AnybatchError as AnybatchError,
    ArgumentsError as ArgumentsError,
    BatchError as BatchError,
    CheckpointError as CheckpointError,
    DoctorError as DoctorError,
    DropoutError as DropoutError,
    ExactnessError as ExactnessError,
    LessonError as LessonError,
    LockstepError as LockstepError,
    LossError as LossError,
    MemoryLimitError as MemoryLimitError,
    NonFiniteError as NonFiniteError,
    ParallelError as ParallelError,
    PlanError as PlanError,
    RunError as RunError,
    SettingsError as SettingsError,
    SplitError as SplitError,
    TaskError as TaskError,
    UnitsError as UnitsError,
    UpdateError as UpdateError,
    VerifyError as VerifyError,
    WindowError as WindowError,
)
from anybatch.memory import (
    Breakdown as Breakdown,
    Checkpointing as Checkpointing,
    Fit as Fit,
    Fitted as Fitted,
    Plan as Plan,
    SizePeak as SizePeak,
    measure_peak as measure_peak,
    plan as plan,
)
from anybatch.noise import (
    NoiseScale as NoiseScale,
)
from anybatch.objectives import (
    InfoNCE as InfoNCE,
    Terms as Terms,
    clip_loss as clip_loss,
    huggingface as huggingface,
    info_nce as info_nce,
    observed as observed,
    sentence_transformers as sentence_transformers,
)
from anybatch.parallel import (
    GlobalBatches as GlobalBatches,
    repeated_rows as repeated_rows,
)
from anybatch.ragged import (
    Auto as Auto,
    Choice as Choice,
    Cost as Cost,
    Tokens as Tokens,
)
from anybatch.verification import (
    Cause as Cause,
    CutResult as CutResult,
    ParameterDeviation as ParameterDeviation,
    ParameterError as ParameterError,
    Verdict as Verdict,
    verify as verify,
)
from anybatch.core import events as _events

stages = _events

__version__: str
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
