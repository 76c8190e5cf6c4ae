"""Draws from generators that torch knows nothing of, and draws of torch that belong to no row."""

import random
import sys
from dataclasses import replace

import torch
from torch import Tensor

from anybatch.core import outer_random
from anybatch.verification.case import Case
from anybatch.verification.causes.experiments import Experiments
from anybatch.verification.causes.model_changes import RANDOM_FIX, STATE_FIX, forward_changes
from anybatch.verification.draws import Draw
from anybatch.verification.floor import Floor, Gradient, largest_floor, relative
from anybatch.verification.verdict import Cause


def explain_draws(case: Case, floor: Floor, moved: list[str]) -> tuple[Cause, ...]:
    """Find draws that are wrong though every row was given the same draws again.

    `moved` are generators outside torch that were drawn from.
    """
    draws, loss_draws = case.draws, case.loss_draws
    if draws.seeded:
        return (
            Cause(
                kind="draws",
                explanation=f"The forward starts its random generator anew ({draws.seeded[0]} after a seed set inside it): the "
                "rows of every micro-batch draw what the first rows of the batch drew, and in one go they would not.",
                fix="Seed once, before training: take torch.manual_seed(...) or the new torch.Generator out of the forward.",
            ),
        )
    if draws.unlike:
        return (
            Cause(
                kind="draws",
                explanation=f"The forward draws ({draws.unlike[0]}) from a torch.Generator of its own. A coupled loss runs "
                "each micro-batch twice, and only torch's own generators are put back for the second time: it draws others.",
                fix="Draw from torch's own generator: leave generator= out.",
            ),
        )
    if draws.shared and _do_shared_matter(case, floor):
        what = next(iter(draws.shared.values()))
        return (
            Cause(
                kind="draws",
                explanation=f"One draw is shared by all rows of a micro-batch ({what}): MixUp's lambda, one crop or one "
                "skipped layer for all of them. The whole batch would draw it once, and each micro-batch draws another.",
                fix="Draw one number per row, torch.rand(len(x), 1) in place of torch.rand(1); or draw it in the loader and "
                "put it into the batch, one entry per row.",
            ),
        )
    if moved and not loss_draws.strange and _do_outer_matter(case, floor):
        return (_outside(moved, "With other states of it the gradient is another one"),)
    return ()


def find_draws_outside_torch(experiments: Experiments) -> Cause | None:
    """The same rows with the same draws of torch, twice: does the gradient change, and which generator had moved?"""
    before, case = outer_random(), experiments.case
    first = case.whole()
    moved = before.moved()
    apart = relative(first, case.whole())
    before.restore()
    is_seeded = relative(first, case.whole()) < apart
    if case.held.python.changed(is_left=True) and not case.draws.strange:
        apart = max(apart, relative(experiments.floor.whole, first))  # state that only the first run changed
    if apart <= largest_floor(experiments.floor.unit):
        return None
    again = f"Two forwards of the same rows with the same state of torch's generators give gradients {apart:.2g} apart"
    if moved and is_seeded:
        return _outside(moved, f"{again}, and with the same state of it they agree")
    if case.held.python.iterators:
        return Cause(
            kind="state",
            explanation=f"{again}. The loss takes what comes next from {case.held.python.iterators[0]!r}, an iterator, once "
            "per micro-batch instead of once per batch.",
            fix="Take it once per batch, outside the loss, and put it into the batch; or let the loss depend on the model and "
            "the batch alone.",
        )
    outside = _changed_outside(experiments)
    if outside:
        return Cause(
            kind="state",
            explanation=f"{again}. A forward changes {', '.join(outside[:4])}, outside of the model, once per micro-batch "
            "instead of once per batch. Variables of closures, globals and default arguments are not put back.",
            fix=STATE_FIX,
        )
    return Cause(
        kind="randomness",
        explanation=f"{again}. Neither torch, random nor numpy.random moved: a generator made inside the forward, the "
        "time, state that lies where it is not looked for, or a device that adds up in another order each time.",
        fix=f"{RANDOM_FIX} On a device, try torch.use_deterministic_algorithms(True).",
    )


def _changed_outside(experiments: Experiments) -> list[str]:
    """Names of closures' variables, globals and default arguments that a forward changes."""
    try:
        outside = forward_changes(experiments).outside
    except Exception:  # rows that cannot run alone
        outside = []
    return outside or experiments.case.held.python.changed(is_left=True)


def why_unjudged(experiments: Experiments, *, is_exact_without: bool) -> str:
    """Say why gradients could not be compared; `is_exact_without`: they agree without random draws."""
    case = experiments.case
    strange = list(dict.fromkeys([*case.draws.strange, *case.loss_draws.strange]))
    told = "; ".join(strange[:3]) or "which row a number belongs to cannot be read off the shapes of what is drawn"
    same = "With every draw at its mean they are the same. " if is_exact_without else ""
    return (
        f"Random draws could not be drawn again row by row ({told}), so that the gradients of different cuts cannot be "
        f"compared. {same}Verify in model.eval(), where nothing is drawn, or draw one set of numbers per row, rows first."
    )


def find_mixed_rows(experiments: Experiments, failure: str | None) -> Cause | None:
    """Orders and partners that are drawn for the rows: rows are mixed with others of their micro-batch."""
    case = experiments.case
    orders = [*case.draws.orders, *case.loss_draws.orders]
    if not orders and failure is not None and "IndexError" in failure:
        drawn = [draw for draw in case.draws.whole if not draw.numbers.is_floating_point()]
        orders = [f"{draw.operation} of {tuple(draw.numbers.shape)}" for draw in drawn]
    if not orders:
        return None
    return Cause(
        kind="coupled",
        explanation=f"Rows are mixed with other rows of their micro-batch, in an order that the forward draws ({orders[0]}): "
        "MixUp, or negatives taken from the batch. The whole batch pairs them otherwise.",
        fix="Mix rows before the batch is cut: in the loader's collate_fn, so that a row and its partner lie in one row.",
    )


def _outside(moved: list[str], told: str) -> Cause:
    return Cause(
        kind="randomness",
        explanation=f"The forward draws from {' and '.join(moved)}, which torch knows nothing of. {told}.",
        fix=RANDOM_FIX,
    )


def _do_shared_matter(case: Case, floor: Floor) -> bool:
    """Whether the gradient is another one where the draws that all rows share are others."""
    for way in range(3):
        whole = list(case.draws.whole)
        for number in case.draws.shared:
            whole[number] = replace(whole[number], numbers=_other_numbers(whole[number], way))
        if _is_other(replace(case, draws=replace(case.draws, whole=whole, _seen={})), floor):
            return True
    return False


def _other_numbers(draw: Draw, way: int) -> Tensor:
    """Numbers that might have been drawn instead: the least and the largest of a share, the opposite of noise and masks."""
    numbers = draw.numbers
    if not numbers.is_floating_point():
        return (numbers + 1, (numbers - 1).clamp(min=0), torch.zeros_like(numbers))[way]
    if "normal" in draw.operation or "randn" in draw.operation:
        return numbers * (-1.0, 2.0, 0.5)[way]
    if "bernoulli" in draw.operation or "dropout" in draw.operation:
        return (numbers.amax() - numbers, torch.zeros_like(numbers), torch.ones_like(numbers))[way]
    return (torch.zeros_like(numbers), torch.full_like(numbers, 0.999), torch.full_like(numbers, 0.5))[way]


def _do_outer_matter(case: Case, floor: Floor) -> bool:
    """Whether the gradient is another one with other numbers from Python's and NumPy's generators."""
    for seed in range(3):
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        if _is_other(case, floor):
            return True
    return False


def _is_other(case: Case, floor: Floor) -> bool:
    try:
        now: Gradient = case.whole()
    except Exception:  # numbers that the forward cannot take: it looks at them
        return True
    return relative(floor.whole, now) > largest_floor(floor.unit)
