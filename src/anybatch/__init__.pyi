from anybatch.app.training.checkpoints import (
    Resumed as Resumed,
)
from anybatch.app.training.checkpoints import (
    resume as resume,
)
from anybatch.app.training.checkpoints import (
    save as save,
)
from anybatch.app.training.learning_rates import (
    Scaling as Scaling,
)
from anybatch.app.training.learning_rates import (
    scale_lr as scale_lr,
)
from anybatch.app.training.learning_rates import (
    warmup as warmup,
)
from anybatch.app.training.tasks.task import (
    Task as Task,
)
from anybatch.core import (
    Accumulated as Accumulated,
)
from anybatch.core import (
    Accumulator as Accumulator,
)
from anybatch.core import (
    Batch as Batch,
)
from anybatch.core import (
    Coupled as Coupled,
)
from anybatch.core import (
    Dealt as Dealt,
)
from anybatch.core import (
    Mean as Mean,
)
from anybatch.core import (
    MicroBatches as MicroBatches,
)
from anybatch.core import (
    Objective as Objective,
)
from anybatch.core import (
    PerRow as PerRow,
)
from anybatch.core import (
    Ranks as Ranks,
)
from anybatch.core import (
    Rows as Rows,
)
from anybatch.core import (
    SampleList as SampleList,
)
from anybatch.core import (
    Split as Split,
)
from anybatch.core import (
    Stacked as Stacked,
)
from anybatch.core import (
    Sum as Sum,
)
from anybatch.core import (
    Update as Update,
)
from anybatch.core import (
    UpdateOptions as UpdateOptions,
)
from anybatch.core import (
    UpdateResult as UpdateResult,
)
from anybatch.core import (
    Window as Window,
)
from anybatch.core import (
    Windows as Windows,
)
from anybatch.core import events as _events
from anybatch.core import (
    num_rows as num_rows,
)
from anybatch.core import (
    rows as rows,
)
from anybatch.core import (
    supervised as supervised,
)
from anybatch.core import (
    take_rows as take_rows,
)
from anybatch.core import (
    windows as windows,
)
from anybatch.doctor import (
    Diagnosis as Diagnosis,
)
from anybatch.doctor import (
    Doctor as Doctor,
)
from anybatch.doctor import (
    Finding as Finding,
)
from anybatch.dropout import (
    row_dropout as row_dropout,
)
from anybatch.errors import (
    AnybatchError as AnybatchError,
)
from anybatch.errors import (
    ArgumentsError as ArgumentsError,
)
from anybatch.errors import (
    BatchError as BatchError,
)
from anybatch.errors import (
    CheckpointError as CheckpointError,
)
from anybatch.errors import (
    DoctorError as DoctorError,
)
from anybatch.errors import (
    DropoutError as DropoutError,
)
from anybatch.errors import (
    ExactnessError as ExactnessError,
)
from anybatch.errors import (
    LessonError as LessonError,
)
from anybatch.errors import (
    LockstepError as LockstepError,
)
from anybatch.errors import (
    LossError as LossError,
)
from anybatch.errors import (
    MemoryLimitError as MemoryLimitError,
)
from anybatch.errors import (
    NonFiniteError as NonFiniteError,
)
from anybatch.errors import (
    ParallelError as ParallelError,
)
from anybatch.errors import (
    PlanError as PlanError,
)
from anybatch.errors import (
    RunError as RunError,
)
from anybatch.errors import (
    SettingsError as SettingsError,
)
from anybatch.errors import (
    SplitError as SplitError,
)
from anybatch.errors import (
    TaskError as TaskError,
)
from anybatch.errors import (
    UnitsError as UnitsError,
)
from anybatch.errors import (
    UpdateError as UpdateError,
)
from anybatch.errors import (
    VerifyError as VerifyError,
)
from anybatch.errors import (
    WindowError as WindowError,
)
from anybatch.memory import (
    Breakdown as Breakdown,
)
from anybatch.memory import (
    Checkpointing as Checkpointing,
)
from anybatch.memory import (
    Fit as Fit,
)
from anybatch.memory import (
    Fitted as Fitted,
)
from anybatch.memory import (
    Plan as Plan,
)
from anybatch.memory import (
    SizePeak as SizePeak,
)
from anybatch.memory import (
    measure_peak as measure_peak,
)
from anybatch.memory import (
    plan as plan,
)
from anybatch.noise import (
    NoiseScale as NoiseScale,
)
from anybatch.objectives import (
    InfoNCE as InfoNCE,
)
from anybatch.objectives import (
    Terms as Terms,
)
from anybatch.objectives import (
    clip_loss as clip_loss,
)
from anybatch.objectives import (
    huggingface as huggingface,
)
from anybatch.objectives import (
    info_nce as info_nce,
)
from anybatch.objectives import (
    observed as observed,
)
from anybatch.objectives import (
    sentence_transformers as sentence_transformers,
)
from anybatch.parallel import (
    GlobalBatches as GlobalBatches,
)
from anybatch.parallel import (
    repeated_rows as repeated_rows,
)
from anybatch.ragged import (
    Auto as Auto,
)
from anybatch.ragged import (
    Choice as Choice,
)
from anybatch.ragged import (
    Cost as Cost,
)
from anybatch.ragged import (
    Tokens as Tokens,
)
from anybatch.verification import (
    Cause as Cause,
)
from anybatch.verification import (
    CutResult as CutResult,
)
from anybatch.verification import (
    ParameterDeviation as ParameterDeviation,
)
from anybatch.verification import (
    ParameterError as ParameterError,
)
from anybatch.verification import (
    Verdict as Verdict,
)
from anybatch.verification import (
    verify as verify,
)

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
