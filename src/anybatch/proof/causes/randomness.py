"""Draws from generators that torch knows nothing of, and draws of torch that belong to no row."""

from anybatch.proof.cases import closure_state
from anybatch.proof.causes.experiments import Experiments
from anybatch.proof.causes.leftover_state import RANDOM_FIX
from anybatch.proof.floor import largest_floor, relative
from anybatch.proof.verdict import Cause
from anybatch.state import outer_random


def find_draws_outside_torch(experiments: Experiments) -> Cause | None:
    """The same rows with the same draws of torch, twice: does the gradient change, and which generator had moved?"""
    before, loss = outer_random(), experiments.case.objective.loss
    held = closure_state(loss)
    first = experiments.case.whole()
    moved = before.moved()
    counted = [name for name, value in closure_state(loss).items() if held.get(name) != value]
    apart = relative(first, experiments.case.whole())
    before.restore()
    is_seeded = relative(first, experiments.case.whole()) < apart
    if apart <= largest_floor(experiments.floor.unit):
        return None
    again = f"Two forwards of the same rows with the same state of torch's generators give gradients {apart:.2g} apart"
    if moved and is_seeded:
        return Cause(
            kind="randomness",
            explanation=f"{again}. The forward draws from {' and '.join(moved)}; with the same state of it they agree.",
            fix=RANDOM_FIX,
        )
    if counted:
        return Cause(
            kind="state",
            explanation=f"{again}. The loss function changes {', '.join(map(repr, counted))}, which it closes over.",
            fix="Let the loss depend on the model and the batch alone; what must count updates belongs outside of it.",
        )
    return Cause(
        kind="randomness",
        explanation=f"{again}. Neither torch, random nor numpy.random moved: a generator made inside the forward, the "
        "time, or a device that adds up in another order each time.",
        fix=f"{RANDOM_FIX} On a device, try torch.use_deterministic_algorithms(True).",
    )


def find_draws_not_by_row(experiments: Experiments) -> Cause | None:
    """Draws of micro-batches that could not be found among those of the whole batch."""
    strange = list(dict.fromkeys([*experiments.case.draws.strange, *experiments.case.loss_draws.strange]))
    if not strange:
        return None
    return Cause(
        kind="draws",
        explanation=f"Random draws could not be replayed row by row: {'; '.join(strange[:3])}. Another cut draws other "
        "numbers, so that gradients cannot be compared.",
        fix="Draw one set of numbers per row, rows first, or verify in model.eval(), where nothing is drawn.",
    )
