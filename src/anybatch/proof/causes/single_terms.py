"""A loss of several terms: which of them is not what its units say?"""

from dataclasses import replace
from typing import Any

from torch import nn

from anybatch.batches import Batch
from anybatch.objectives import Objective, TermLosses
from anybatch.proof.causes.counting_units import find_units
from anybatch.proof.causes.experiments import Experiments
from anybatch.proof.verdict import Cause


def find_wrong_term(experiments: Experiments) -> Cause | None:
    """Take each term by itself, as the one loss, and see which is not exact; then which units would make it so."""
    objective = experiments.objective
    if objective is None or not objective.terms:
        return None
    for name, units in objective.terms.items():
        alone = replace(experiments.case, objective=Objective(_only(objective, name), units or (lambda batch: 1)))
        one = replace(experiments, case=alone, floor=replace(experiments.floor, whole=alone.whole()))
        now = one.try_out(alone)
        if now.is_exact:
            continue
        if units is None:
            return Cause(
                kind="units",
                explanation=f"The term {name!r} is given units=None, which is for a penalty that is the same for all rows; "
                "but it is a mean over rows: it differs from micro-batch to micro-batch.",
                fix=f"Give the term {name!r} its units, what its mean divides by, in Terms(loss, units=...).",
            )
        found = find_units(one, now)
        told = "" if found is None else f" {found[0].explanation}"
        fix = "what its mean divides by" if found is None else found[0].fix.removeprefix("Give units=").rstrip(".")
        return Cause(
            kind="units",
            explanation=f"The term {name!r} is not what its units say, by itself too.{told}",
            fix=f"Give the term {name!r} its right units in Terms(loss, units=...): {fix}.",
        )
    return None


def _only(objective: Objective, name: str) -> Any:
    def loss(model: nn.Module, batch: Batch) -> Any:
        returned: Any = objective.loss(model, batch)
        assert isinstance(returned, TermLosses)
        return returned.losses[name]

    return loss
