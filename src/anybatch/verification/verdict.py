"""Results of `verify`: errors of every cut, and causes with their fixes."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from anybatch.display import html_block, html_table
from anybatch.display import sentences as html_sentences
from anybatch.verification.floor import ParameterDeviation
from anybatch.verification.precision import ComparedPrecision

CauseKind = Literal[
    "units",
    "sum",
    "mean",
    "not_additive",
    "coupled",
    "groups",
    "batch_norm",
    "state",
    "randomness",
    "draws",
    "touched",
    "inputs",
    "padding",
    "precision",
    "nonfinite",
    "error",
    "unknown",
]
ProofFinding = Literal["exact", "not exact", "could not be judged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A reason why the accumulated gradient is not the whole batch's.

    Attributes:
        kind: The kind in one word, such as "units", "coupled", "batch_norm" or "state"; "unknown" if no experiment found it.
        explanation: Sentences that say what happens, and what the experiment showed.
        fix: A sentence that says what to write instead.
    """

    kind: CauseKind
    explanation: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CutResult:
    """Errors of the accumulated gradient for one cut of the batch in one precision.

    Attributes:
        name: Name of the cut, such as "as configured: Rows(size=4)" or "uneven rows".
        precision: "float64", or "own" for the model's own precision.
        micro_batches: Number of micro-batches.
        rows: Number of rows of each micro-batch.
        error: |accumulated - whole| / |whole| over all parameters; inf if the cut could not run.
        parameters: Error and floor of each parameter.
        failure: The exception as text if this cut could not run, else None.
        decides: False for a cut that is not used in training; the verdict does not depend on it.
    """

    name: str
    precision: ComparedPrecision
    micro_batches: int
    rows: tuple[int, ...]
    error: float
    parameters: tuple[ParameterDeviation, ...]
    failure: str | None = None
    decides: bool = True

    @property
    def is_exact(self) -> bool:
        """True if the cut ran and every parameter is within its floor."""
        return self.failure is None and all(parameter.is_exact for parameter in self.parameters)

    @property
    def worst(self) -> ParameterDeviation | None:
        """The parameter with the largest ratio of error to floor."""
        return max(self.parameters, key=_over_floor, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWeights:
    """Weight of the rows of one micro-batch in the accumulated gradient.

    Attributes:
        rows: Their numbers in the batch.
        weight: The weight that they have.
        wanted: The weight that would be exact; None if there is none, because rows depend on each other.
    """

    rows: tuple[int, ...]
    weight: float
    wanted: float | None

    @property
    def counted(self) -> float | None:
        """Weight with which each row counted: 1 is right, 0 is not at all, None is unknown."""
        return None if not self.wanted else self.weight / self.wanted


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verdict:
    """Result of `verify`: whether the accumulated gradient is the whole batch's up to the order of summation.

    `print(verdict)` gives a paragraph, `describe()` a table for a terminal, `as_json()` plain values.

    Attributes:
        rows: Number of rows that were compared.
        rows_given: Number of rows of the batch; more than `rows` if not all fit into the memory given.
        dtype: The model's own precision, such as "float32" or "float32 with bfloat16 autocast".
        cuts: Errors for each cut and precision.
        causes: Reasons for a difference, each with its fix; empty if the gradient is exact.
        notes: Remarks that do not change the verdict.
        unjudged: The reason why gradients could not be compared; empty if they could.
        weights: Weights of the rows of each micro-batch, in the cut of training, or in one that shows the error.

    Example:
        >>> from torch import nn, randn
        >>> from anybatch import Objective, verify
        >>> verdict = verify(nn.Linear(4, 1), Objective(lambda model, batch: model(batch).square().sum()), randn(9, 4))
        >>> verdict.finding, [cause.kind for cause in verdict.causes]
        ('not exact', ['sum'])
    """

    rows: int
    rows_given: int
    dtype: str
    cuts: tuple[CutResult, ...]
    causes: tuple[Cause, ...] = ()
    notes: tuple[str, ...] = ()
    unjudged: str = ""
    weights: tuple[RowWeights, ...] = ()

    @property
    def finding(self) -> ProofFinding:
        """The verdict: "exact", "not exact" or "could not be judged"."""
        if self.unjudged:
            return "could not be judged"
        return "exact" if self.is_exact else "not exact"

    @property
    def is_judged(self) -> bool:
        """True if gradients could be compared."""
        return not self.unjudged

    @property
    def is_exact(self) -> bool:
        """True if every parameter is within its floor in every cut that decides, and no cause was found."""
        return self.is_judged and not self.causes and all(cut.is_exact for cut in self.cuts if cut.decides)

    @property
    def error(self) -> float:
        """Largest error of the cuts that decide."""
        return max((cut.error for cut in self.cuts if cut.decides), default=0.0)

    def __repr__(self) -> str:
        causes = f", causes: {', '.join(cause.kind for cause in self.causes)}" if self.causes else ""
        return f"Verdict({self.finding}, error {self.error:.1e}, {self.rows} rows, {len(self.cuts)} cuts{causes})"

    def __str__(self) -> str:
        if self.unjudged:
            return " ".join([f"The gradient of {self.rows} rows could not be judged.", self.unjudged, *self.notes])
        found = "is" if self.is_exact else "is not"
        errors: dict[str, float] = {}
        for cut in self.cuts:
            errors[self._precision(cut)] = max(errors.get(self._precision(cut), 0.0), cut.error)
        numbers = " and ".join(f"{error:.1e} in {precision}" for precision, error in errors.items())
        floor = "within" if self.is_exact else "above"
        sentences = [
            f"The accumulated gradient of {self.rows} rows {found} the whole batch's, in {len(self.cuts)} cuts: the largest "
            f"error is {numbers}, {floor} what the order of summation explains.",
            *(f"Cause ({cause.kind}): {cause.explanation} Fix: {cause.fix}" for cause in self.causes),
            *self.notes,
        ]
        return " ".join(sentences)

    def _repr_html_(self) -> str:
        names = ["cut", "precision", "micro-batches", "error", "exact"]
        cuts = [
            [cut.name, self._precision(cut), cut.micro_batches, f"{cut.error:.1e}", "yes" if cut.is_exact else "no"]
            for cut in self.cuts
        ]
        causes = html_table(["cause", "why", "fix"], [[each.kind, each.explanation, each.fix] for each in self.causes])
        title = f"{self.finding.capitalize()}: {self.rows} rows, accumulated against the whole batch in one go"
        notes = [self.unjudged, *self.notes] if self.unjudged else self.notes
        return html_block(title, html_table(names, cuts), causes if self.causes else "", html_sentences(notes))

    def describe(self) -> str:
        """Return the verdict in words and numbers, for a terminal."""
        of_given = f" of {self.rows_given}" if self.rows != self.rows_given else ""
        lines = [f"{self.finding}: {self.rows}{of_given} rows, accumulated against the whole batch in one go"]
        width = max((len(cut.name) for cut in self.cuts), default=0)
        for cut in self.cuts:
            lines.append(f"  {cut.name:<{width}}  {self._precision(cut):<8}  {_numbers(cut)}")
        if self.unjudged:
            lines += ["", self.unjudged]
        for cause in self.causes:
            lines += ["", f"cause ({cause.kind}): {cause.explanation}", f"fix: {cause.fix}"]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def as_json(self) -> dict[str, Any]:
        """Return plain values for JSON: the fields, `finding`, and `is_exact` of the verdict and of every cut."""
        plain = _finite(dataclasses.asdict(self))
        for cut, result in zip(plain["cuts"], self.cuts, strict=True):
            cut["is_exact"] = result.is_exact
        for rows, weights in zip(plain["weights"], self.weights, strict=True):
            rows["counted"] = _finite(weights.counted)
        return {"finding": self.finding, "is_exact": self.is_exact, "error": _finite(self.error), **plain}

    def _precision(self, cut: CutResult) -> str:
        return "float64" if cut.precision == "float64" else self.dtype


def _numbers(cut: CutResult) -> str:
    if cut.failure is not None:
        return f"failed: {cut.failure}"
    worst = cut.worst
    mark = "exact" if cut.is_exact else "NOT EXACT" if cut.decides else "not exact"
    where = "" if worst is None else f"; {worst.name} {worst.error:.1e}, floor {worst.floor:.1e}"
    return f"{cut.micro_batches:>3} micro-batches  error {cut.error:.1e}  {mark}{where}"


def _over_floor(parameter: ParameterDeviation) -> float:
    if parameter.error == 0:
        return 0.0
    return parameter.error / parameter.floor if parameter.floor else math.inf


def _finite(value: Any) -> Any:
    """Replace inf and nan, which JSON does not have, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
