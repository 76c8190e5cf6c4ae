"""Results of `verify`: numbers for every cut, and causes with their fixes."""

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
    """Why the accumulated gradient is not the whole batch's."""

    kind: CauseKind
    explanation: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CutResult:
    """One cut in one precision."""

    name: str
    precision: ComparedPrecision
    micro_batches: int
    rows: tuple[int, ...]
    """How many rows each micro-batch had."""
    error: float
    """|accumulated - whole| / |whole| over all parameters."""
    parameters: tuple[ParameterDeviation, ...]
    failure: str | None = None
    """The error, if this cut could not run."""
    decides: bool = True
    """False of a cut that nobody trains with."""

    @property
    def is_exact(self) -> bool:
        return self.failure is None and all(parameter.is_exact for parameter in self.parameters)

    @property
    def worst(self) -> ParameterDeviation | None:
        """The parameter that is furthest above its floor, or nearest to it."""
        return max(self.parameters, key=_over_floor, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWeights:
    """Weight of the rows of one micro-batch in the accumulated gradient, and their right weight."""

    rows: tuple[int, ...]
    """Their numbers in the batch."""
    weight: float
    wanted: float | None
    """None where no weight would be right: rows look at each other."""

    @property
    def counted(self) -> float | None:
        """How often each of its rows counted: 1 is right, 0 is not at all, None is not known."""
        return None if not self.wanted else self.weight / self.wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of `verify`: is the accumulated gradient the whole batch's, up to the order of summation; if not, why?"""

    rows: int
    """Rows that were compared."""
    rows_given: int
    """Rows of the batch; more than `rows` where not all fit into the memory given."""
    dtype: str
    """The model's own precision."""
    cuts: tuple[CutResult, ...]
    causes: tuple[Cause, ...] = ()
    notes: tuple[str, ...] = ()
    unjudged: str = ""
    """Why it could not be judged, where it could not."""
    weights: tuple[RowWeights, ...] = ()
    """Weights of the rows of each micro-batch, in the cut that trains, or in one that shows the error."""

    @property
    def finding(self) -> ProofFinding:
        """The verdict in a word or two."""
        if self.unjudged:
            return "could not be judged"
        return "exact" if self.is_exact else "not exact"

    @property
    def is_judged(self) -> bool:
        return not self.unjudged

    @property
    def is_exact(self) -> bool:
        """True if every parameter is within its floor, in every cut that decides and every precision, and nothing draws."""
        return self.is_judged and not self.causes and all(cut.is_exact for cut in self.cuts if cut.decides)

    @property
    def error(self) -> float:
        """The largest error of any cut that decides, over all parameters."""
        return max((cut.error for cut in self.cuts if cut.decides), default=0.0)

    def __repr__(self) -> str:
        head = self.finding
        causes = f", causes: {', '.join(cause.kind for cause in self.causes)}" if self.causes else ""
        return f"Verdict({head}, error {self.error:.1e}, {self.rows} rows, {len(self.cuts)} cuts{causes})"

    def __str__(self) -> str:
        """A paragraph: whether it is exact, the numbers, the causes and what to do."""
        if self.unjudged:
            return " ".join([f"The gradient of {self.rows} rows could not be judged.", self.unjudged, *self.notes])
        found = "is" if self.is_exact else "is not"
        errors = {self._precision(cut): 0.0 for cut in self.cuts}
        for cut in self.cuts:
            errors[self._precision(cut)] = max(errors[self._precision(cut)], cut.error)
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
        """The verdict in words and numbers, for a terminal."""
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
        """Plain values for JSON: the fields, `finding`, and `is_exact` of the verdict and of every cut."""
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
    """JSON has no inf: None stands for it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
