"""The lesson that explains each class of error, kind of cause and kind of finding; a test checks that all have one."""

from anybatch.errors import AnybatchError


def _by_name(**names: str) -> dict[str, str]:
    return {name: lesson for lesson, listed in names.items() for name in listed.split()}


LESSON_OF_ERROR = _by_name(
    rows="BatchError SplitError VerifyError DoctorError",
    units="UnitsError ExactnessError",
    trace="LossError TaskError CheckpointError LessonError ArgumentsError",
    limits="DropoutError LockstepError ParallelError NonFiniteError",
    zero="WindowError",
    memory="MemoryLimitError PlanError",
    rate="UpdateError SettingsError",
    recall="RunError",
)
LESSON_OF_CAUSE = _by_name(
    limits="batch_norm coupled draws nonfinite not_additive precision randomness state touched",
    trace="error",
    rows="groups inputs unknown",
    units="mean padding sum units",
)
LESSON_OF_FINDING = _by_name(
    zero="cleared-before-use never-cleared",
    rows=(
        "stepped-every-micro-batch tail-dropped tail-leaks left-at-end off-by-one rows-repeated windows-differ by-hand"
    ),
    units="not-divided divided-twice other-divisor uneven-micro-batches opaque-loss loss-logged-divided",
    rate="clip-early clip-after-step schedule-per-micro-batch schedule-before-step schedule-horizon learning-rate",
    limits=(
        "clip-scaled scaler-misuse ddp-every-pass ddp-backward-only ddp-never batch-norm low-precision-sum "
        "negatives-missing eval-left-on"
    ),
    memory="kept-graph",
    trace="unowned-parameters recorder-trouble",
)


def lesson_of_error(error: AnybatchError) -> str:
    """Return the lesson of the error's class, or of the nearest base class that has one.

    >>> from anybatch.errors import UnitsError
    >>> lesson_of_error(UnitsError("0 tokens"))
    'units'
    """
    names = (base.__name__ for base in type(error).__mro__)
    return next((LESSON_OF_ERROR[name] for name in names if name in LESSON_OF_ERROR), "trace")


def lesson_of_cause(kind: str) -> str:
    """Return the lesson of a kind of cause; that of unknown causes if the kind is new.

    >>> lesson_of_cause("batch_norm")
    'limits'
    """
    return LESSON_OF_CAUSE.get(kind, LESSON_OF_CAUSE["unknown"])


def lesson_of_finding(kind: str) -> str:
    """Return the lesson of a kind of finding of the doctor; that of unknown causes if the kind is new.

    >>> lesson_of_finding("not-divided")
    'units'
    """
    return LESSON_OF_FINDING.get(kind, LESSON_OF_CAUSE["unknown"])


def see(lesson: str) -> str:
    """Return the reference to a lesson that ends a message.

    >>> see("units")
    'see: anybatch learn units'
    """
    return f"see: anybatch learn {lesson}"
