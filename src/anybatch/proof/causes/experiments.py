"""The lab: one case in the best precision there is, and the question that every experiment asks of it."""

import math
from dataclasses import dataclass

from anybatch.batches import MicroBatches
from anybatch.objectives import Objective
from anybatch.proof.cases import Case
from anybatch.proof.floor import Floor, relative

FEWER = 3.0
"""An experiment that does not make the gradient exact is one of several causes if it makes the error so many times less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What accumulating came to."""

    error: float
    is_exact: bool
    failure: str | None = None

    def explains(self, before: "Outcome") -> bool:
        """True if what was changed is a cause of the error there was before."""
        return self.is_exact or (self.failure is None and self.error * FEWER < before.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """A case whose accumulated gradient is wrong in one cut."""

    case: Case
    floor: Floor
    cut: MicroBatches

    @property
    def objective(self) -> Objective | None:
        """The objective, where it is not coupled."""
        return self.case.objective if isinstance(self.case.objective, Objective) else None

    def try_out(self, case: Case, cut: MicroBatches | None = None) -> Outcome:
        """The error of this case in the lab's cut, against the gradient of the whole batch."""
        cut = cut or self.cut
        try:
            accumulated = case.accumulated(cut)
        except Exception as error:  # whatever a model raises on a few rows is an outcome
            return Outcome(error=math.inf, is_exact=False, failure=f"{type(error).__name__}: {error}")
        errors = self.floor.errors(accumulated, len(cut))
        return Outcome(
            error=relative(self.floor.whole, accumulated), is_exact=all(parameter.is_exact for parameter in errors)
        )
