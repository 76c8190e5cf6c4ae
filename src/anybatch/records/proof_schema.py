"""What `verify` leaves on disk."""

from dataclasses import dataclass
from typing import ClassVar

from anybatch.records.schema import Values


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRecord:
    """The error of one parameter's gradient, and what the order of summation explains of it."""

    name: str
    error: float | None
    floor: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRecord:
    """One cut of the batch in one precision."""

    name: str
    precision: str
    micro_batches: int | None
    rows: Values
    """How many rows each micro-batch had."""
    error: float | None
    parameters: tuple[ParameterRecord, ...]
    failure: str | None
    """What was raised where this cut could not run."""
    is_exact: bool
    decides: bool = True
    """False of a cut that nobody trains with: a note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsRecord:
    """What the rows of one micro-batch weighed, and what they should."""

    rows: Values
    """Their numbers in the batch."""
    weight: float | None
    wanted: float | None
    counted: float | None
    """How often each row counted: 1 is right, None is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseRecord:
    """Why a gradient was not exact, and what to do."""

    kind: str
    explanation: str
    fix: str
    lesson: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofRecord:
    """The accumulated gradient against the whole batch's: what `verify` found."""

    file: ClassVar[str] = "verify.json"
    finding: str = ""
    """"exact", "not exact" or "could not be judged"."""
    is_exact: bool
    error: float | None
    rows: int | None
    rows_given: int | None
    dtype: str = "own precision"
    cuts: tuple[CutRecord, ...]
    causes: tuple[CauseRecord, ...]
    notes: tuple[str, ...]
    unjudged: str = ""
    """Why it could not be judged, where it could not."""
    weights: tuple[RowsRecord, ...]
