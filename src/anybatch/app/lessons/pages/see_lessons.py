"""Which lesson explains what went wrong: one for every class of error, kind of cause and kind of finding; tests hold it."""

from anybatch.errors import AnybatchError

LESSON_OF_ERROR = {
    "BatchError": "rows",
    "SplitError": "rows",
    "UnitsError": "units",
    "LossError": "trace",
    "DropoutError": "limits",
    "LockstepError": "limits",
    "WindowError": "zero",
    "ParallelError": "limits",
    "MemoryLimitError": "memory",
    "UpdateError": "rate",
    "PlanError": "memory",
    "VerifyError": "rows",
    "ExactnessError": "units",
    "NonFiniteError": "limits",
    "TaskError": "trace",
    "SettingsError": "rate",
    "CheckpointError": "trace",
    "RunError": "recall",
    "LessonError": "trace",
    "DoctorError": "rows",
    "ArgumentsError": "trace",
}
LESSON_OF_CAUSE = {
    "batch_norm": "limits",
    "coupled": "limits",
    "draws": "limits",
    "error": "trace",
    "groups": "rows",
    "inputs": "rows",
    "mean": "units",
    "nonfinite": "limits",
    "not_additive": "limits",
    "padding": "units",
    "precision": "limits",
    "randomness": "limits",
    "state": "limits",
    "sum": "units",
    "touched": "limits",
    "units": "units",
    "unknown": "rows",
}
LESSON_OF_FINDING = {
    "cleared-before-use": "zero",
    "never-cleared": "zero",
    "stepped-every-micro-batch": "rows",
    "tail-dropped": "rows",
    "tail-leaks": "rows",
    "left-at-end": "rows",
    "off-by-one": "rows",
    "rows-repeated": "rows",
    "windows-differ": "rows",
    "by-hand": "rows",
    "not-divided": "units",
    "divided-twice": "units",
    "other-divisor": "units",
    "uneven-micro-batches": "units",
    "opaque-loss": "units",
    "loss-logged-divided": "units",
    "clip-early": "rate",
    "clip-after-step": "rate",
    "schedule-per-micro-batch": "rate",
    "schedule-before-step": "rate",
    "schedule-horizon": "rate",
    "learning-rate": "rate",
    "clip-scaled": "limits",
    "scaler-misuse": "limits",
    "ddp-every-pass": "limits",
    "ddp-backward-only": "limits",
    "ddp-never": "limits",
    "batch-norm": "limits",
    "low-precision-sum": "limits",
    "negatives-missing": "limits",
    "eval-left-on": "limits",
    "kept-graph": "memory",
    "unowned-parameters": "trace",
    "recorder-trouble": "trace",
}


def lesson_of_error(error: AnybatchError) -> str:
    """The lesson of the error's class, or of the nearest class above it that has one.

    >>> from anybatch.errors import UnitsError
    >>> lesson_of_error(UnitsError("0 tokens"))
    'units'
    """
    names = (base.__name__ for base in type(error).__mro__)
    return next((LESSON_OF_ERROR[name] for name in names if name in LESSON_OF_ERROR), "trace")


def lesson_of_cause(kind: str) -> str:
    """The lesson of a kind of cause; what each row counts for, where the kind is not known.

    >>> lesson_of_cause("batch_norm")
    'limits'
    """
    return LESSON_OF_CAUSE.get(kind, LESSON_OF_CAUSE["unknown"])


def lesson_of_finding(kind: str) -> str:
    """The lesson of a kind of finding of the doctor; what each row counts for, where the kind is not known.

    >>> lesson_of_finding("not-divided")
    'units'
    """
    return LESSON_OF_FINDING.get(kind, LESSON_OF_CAUSE["unknown"])


def see(lesson: str) -> str:
    """How a message ends.

    >>> see("units")
    'see: anybatch learn units'
    """
    return f"see: anybatch learn {lesson}"
