"""How experiments are made: one case in the best precision there is, and one cut whose gradient is wrong."""

import math
from dataclasses import dataclass, replace

from anybatch.batches import MicroBatches
from anybatch.objectives import Objective
from anybatch.proof.cases import Case, Gradient
from anybatch.proof.floor import Floor, relative

CLEAR_FALL = 3.0
"""What an experiment changed is one of several causes if the error falls by this factor, though not to the floor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentResult:
    """What accumulating gave in one experiment."""

    error: float
    is_exact: bool
    failure: str | None = None

    def explains(self, before: "ExperimentResult") -> bool:
        """True if what was changed is a cause of the error there was before."""
        return self.is_exact or (self.failure is None and self.error * CLEAR_FALL < before.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiments:
    """A case whose accumulated gradient is wrong in one cut; an experiment runs it again with one thing changed."""

    case: Case
    floor: Floor
    cut: MicroBatches
    trained: MicroBatches
    """The cut that trains; the same where that shows most."""

    @property
    def objective(self) -> Objective | None:
        """The objective, where it is not coupled."""
        return self.case.objective if isinstance(self.case.objective, Objective) else None

    @property
    def is_drawn(self) -> bool:
        """True where anything was drawn at random."""
        return self.case.draws.is_drawn or self.case.loss_draws.is_drawn

    def without_draws(self) -> "Experiments":
        """The same with every random draw at its mean."""
        quiet = self.case.quiet()
        whole = quiet.record()
        return replace(self, case=quiet, floor=replace(self.floor, whole=whole))

    def try_out(self, case: Case, cut: MicroBatches | None = None) -> ExperimentResult:
        """The error of this case in the cut, against the gradient of the whole batch."""
        cut = cut or self.cut
        try:
            accumulated = case.accumulated(cut)
        except Exception as error:  # whatever a model raises on a few rows is an outcome
            return ExperimentResult(error=math.inf, is_exact=False, failure=f"{type(error).__name__}: {error}")
        errors = self.floor.errors(accumulated, len(cut))
        return ExperimentResult(
            error=relative(self.floor.whole, accumulated), is_exact=all(parameter.is_exact for parameter in errors)
        )

    def each_alone(self) -> list[Gradient]:
        """The gradient of each micro-batch by itself."""
        return [self.case.once(part, rows) for part, rows in zip(self.cut, self.cut.row_numbers, strict=True)]
