"""Causes in what a forward changes or draws: state, inputs, statistics of BatchNorm, random draws."""

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anybatch.batch_norm import batch_norms, uses_batch_statistics
from anybatch.core import Batch, NormLayer, outer_random, tensors
from anybatch.verification.case import Case, Experiments, Forward, explains, with_forward
from anybatch.verification.draws import Draw
from anybatch.verification.floor import Floor, largest_floor, relative
from anybatch.verification.state import PythonState, copy_batch, functions_of
from anybatch.verification.verdict import Cause, CutResult

RANDOM_FIX = (
    "Draw from torch's generator (torch.rand, torch.randn, F.dropout), which can be replayed, or put the numbers into "
    "the batch, one entry per row."
)
STATE_FIX = (
    "Let forward depend on parameters, rows and torch's generators alone. Count updates outside the model, for "
    "example after update(batch), and keep running statistics out of the training forward's output."
)
Repair = tuple[Cause, Case, CutResult]
"""A cause, the case without it, and the result of that case."""


def find_model_state(experiments: Experiments, before: CutResult) -> Repair | None:
    """Restore the state that a forward changes before every micro-batch, and see whether the error disappears."""
    changed = forward_changes(experiments).state
    if not changed:
        return None
    repaired = replace(experiments.case, restores_state=True)
    after = experiments.try_out(repaired)
    if not explains(after, before):
        return None
    cause = Cause(
        kind="state",
        explanation=f"A forward changes {', '.join(changed[:4])}, once per micro-batch instead of once per batch. With "
        f"the state put back before each micro-batch the error falls from {before.error:.1e} to {after.error:.1e}.",
        fix=STATE_FIX,
    )
    return cause, repaired, after


def find_changed_inputs(experiments: Experiments, before: CutResult) -> Repair | None:
    """Give every forward a copy of its rows if it writes into them, and see whether the error disappears."""
    written: list[str] = []

    def spy(function: Forward) -> Forward:
        def spied(model: nn.Module, batch: Batch) -> Any:
            rows = copy_batch(batch)
            result = function(model, batch)
            pairs = zip(tensors(rows), tensors(batch), strict=True)
            written.extend(f"a tensor of shape {tuple(new.shape)}" for old, new in pairs if not torch.equal(old, new))
            return result

        return spied

    watched = replace(experiments.case, objective=with_forward(experiments.case.objective, spy))
    watched.once(experiments.cut[0], experiments.cut.row_numbers[0])
    repaired = replace(experiments.case, copies_inputs=True)
    after = experiments.try_out(repaired) if written else before
    if not written or not explains(after, before):
        return None
    cause = Cause(
        kind="inputs",
        explanation=f"The forward writes into its input ({', '.join(written)}). Micro-batches are views of the batch, "
        f"and what runs a second time runs on changed rows. With copies the error falls from {before.error:.1e} to "
        f"{after.error:.1e}.",
        fix="Do not change the batch in place: x = x * 2 instead of x *= 2, F.relu(x) instead of F.relu_(x).",
    )
    return cause, repaired, after


def find_own_generator(experiments: Experiments) -> Cause | None:
    """Look for random generators of Python and NumPy that the model or the loss holds and that a forward moves."""
    moved = forward_changes(experiments).generators
    if not moved:
        return None
    return Cause(
        kind="randomness",
        explanation=f"The forward draws from {', '.join(moved)}, a random generator that the model holds and torch "
        "knows nothing of: what a row draws depends on how many rows came before it.",
        fix=RANDOM_FIX,
    )


class ForwardChanges(NamedTuple):
    """Names of the state that one forward changes."""

    state: list[str]
    """All state except running statistics."""
    generators: list[str]
    """Random generators of Python and NumPy."""
    outside: list[str]
    """State that no run restores: closures, globals, default arguments."""


def forward_changes(experiments: Experiments) -> ForwardChanges:
    """Run one micro-batch and compare the state that it reaches before and after."""
    found: list[ForwardChanges] = []
    case = experiments.case

    def watch(model: nn.Module) -> Callable[[], None]:
        state = PythonState(model, *functions_of(case.objective), owned=[*model.modules()], keeps_tensors=True)
        norms = {name for name, module in model.named_modules() if isinstance(module, NormLayer)}

        def compare() -> None:
            names = [name for name in state.changed() if name.partition(" ")[0].rpartition(".")[0] not in norms]
            found.append(ForwardChanges(names, state.moved_generators(), state.changed(is_left=True)))

        return compare

    case.once(experiments.cut[0], experiments.cut.row_numbers[0], watch)
    return found[0]


def find_batch_norm(experiments: Experiments, before: CutResult) -> Repair | None:
    """Pool the statistics over the whole batch, and see whether the gradient changes."""
    layers = [name for name, layer in batch_norms(experiments.case.model).items() if uses_batch_statistics(layer)]
    if not layers or experiments.case.batch_norm in ("exact", "frozen"):
        return None
    repaired = replace(experiments.case, batch_norm="exact")
    after = experiments.try_out(repaired)
    # it is a cause if it changes the gradient, even if another cause hides the effect
    if after.failure is not None or abs(after.error - before.error) <= largest_floor(experiments.floor.unit):
        return None
    named = ", ".join(map(repr, layers[:3])) + (", ..." if len(layers) > 3 else "")
    plural = "s" if len(layers) > 1 else ""
    falls = f"the error falls from {before.error:.1e} to {after.error:.1e}"
    effect = falls if explains(after, before) else "the gradient is another one"
    cause = Cause(
        kind="batch_norm",
        explanation=f"{len(layers)} BatchNorm layer{plural} ({named}) took the statistics of each micro-batch instead "
        f"of the batch's. Pooled over the whole batch {effect}.",
        fix="Use batch_norm='exact'; or batch_norm='frozen' where the running statistics are to be used; or GroupNorm, "
        "whose rows do not look at each other.",
    )
    return cause, repaired, after


def explain_draws(case: Case, floor: Floor, moved: list[str]) -> tuple[Cause, ...]:
    """Find draws that are wrong though every row was given the same draws again; `moved` are generators outside torch."""
    draws = case.draws
    if draws.seeded:
        explanation = (
            f"The forward starts its random generator anew ({draws.seeded[0]} after a seed set inside it): the rows of every "
            "micro-batch draw what the first rows of the batch drew, and in one go they would not."
        )
        fix = "Seed once, before training: take torch.manual_seed(...) or the new torch.Generator out of the forward."
    elif draws.unlike:
        explanation = (
            f"The forward draws ({draws.unlike[0]}) from a torch.Generator of its own. A coupled loss runs each micro-batch "
            "twice, and only torch's own generators are put back for the second time: it draws others."
        )
        fix = "Draw from torch's own generator: leave generator= out."
    elif draws.shared and _do_shared_matter(case, floor):
        explanation = (
            f"One draw is shared by all rows of a micro-batch ({next(iter(draws.shared.values()))}): MixUp's lambda, one crop "
            "or one skipped layer for all of them. The whole batch would draw it once, and each micro-batch draws another."
        )
        fix = (
            "Draw one number per row, torch.rand(len(x), 1) in place of torch.rand(1); or draw it in the loader and put it "
            "into the batch, one entry per row."
        )
    elif moved and not case.loss_draws.strange and _do_outer_matter(case, floor):
        return (_outside(moved, "With other states of it the gradient is another one"),)
    else:
        return ()
    return (Cause(kind="draws", explanation=explanation, fix=fix),)


def find_draws_outside_torch(experiments: Experiments) -> Cause | None:
    """Run the same rows with the same draws of torch twice, and find what makes the gradients differ."""
    before, case = outer_random(), experiments.case
    first = case.whole()
    moved = before.moved()
    apart = relative(first, case.whole())
    before.restore()
    is_seeded = relative(first, case.whole()) < apart
    if case.held.changed(is_left=True) and not case.draws.strange:
        apart = max(apart, relative(experiments.floor.whole, first))  # only the first run changed it
    if apart <= largest_floor(experiments.floor.unit):
        return None
    again = f"Two forwards of the same rows with the same state of torch's generators give gradients {apart:.2g} apart"
    if moved and is_seeded:
        return _outside(moved, f"{again}, and with the same state of it they agree")
    if case.held.iterators:
        return Cause(
            kind="state",
            explanation=f"{again}. The loss takes what comes next from {case.held.iterators[0]!r}, an iterator, once "
            "per micro-batch instead of once per batch.",
            fix="Take it once per batch, outside the loss, and put it into the batch; or let the loss depend on the model and "
            "the batch alone.",
        )
    try:
        outside = forward_changes(experiments).outside
    except Exception:  # rows that cannot run alone
        outside = []
    outside = outside or case.held.changed(is_left=True)
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


def why_unjudged(experiments: Experiments, *, is_exact_without: bool) -> str:
    """Say why gradients could not be compared; with `is_exact_without` they agree without random draws."""
    case = experiments.case
    strange = list(dict.fromkeys([*case.draws.strange, *case.loss_draws.strange]))
    drawn = "; ".join(strange[:3]) or "which row a number belongs to cannot be read off the shapes of what is drawn"
    same = "With every draw at its mean they are the same. " if is_exact_without else ""
    return (
        f"Random draws could not be drawn again row by row ({drawn}), so that the gradients of different cuts cannot be "
        f"compared. {same}Verify in model.eval(), where nothing is drawn, or draw one set of numbers per row, rows first."
    )


def find_mixed_rows(experiments: Experiments, failure: str | None) -> Cause | None:
    """Look for a drawn permutation or choice of rows, which mixes rows of a micro-batch."""
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


def _outside(moved: list[str], evidence: str) -> Cause:
    return Cause(
        kind="randomness",
        explanation=f"The forward draws from {' and '.join(moved)}, which torch knows nothing of. {evidence}.",
        fix=RANDOM_FIX,
    )


def _do_shared_matter(case: Case, floor: Floor) -> bool:
    """True if the gradient depends on the draws that all rows share."""
    for way in range(3):
        whole = list(case.draws.whole)
        for number in case.draws.shared:
            whole[number] = replace(whole[number], numbers=_other_numbers(whole[number], way))
        if _is_other(replace(case, draws=replace(case.draws, whole=whole, _seen={})), floor):
            return True
    return False


def _other_numbers(draw: Draw, way: int) -> Tensor:
    """Return numbers that might have been drawn instead: the ends of a range, the opposite of noise and masks."""
    numbers = draw.numbers
    if not numbers.is_floating_point():
        return (numbers + 1, (numbers - 1).clamp(min=0), torch.zeros_like(numbers))[way]
    if "normal" in draw.operation or "randn" in draw.operation:
        return numbers * (-1.0, 2.0, 0.5)[way]
    if "bernoulli" in draw.operation or "dropout" in draw.operation:
        return (numbers.amax() - numbers, torch.zeros_like(numbers), torch.ones_like(numbers))[way]
    return (torch.zeros_like(numbers), torch.full_like(numbers, 0.999), torch.full_like(numbers, 0.5))[way]


def _do_outer_matter(case: Case, floor: Floor) -> bool:
    """True if the gradient depends on Python's or NumPy's generator."""
    for seed in range(3):
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        if _is_other(case, floor):
            return True
    return False


def _is_other(case: Case, floor: Floor) -> bool:
    try:
        now = case.whole()
    except Exception:  # the forward refuses these numbers, so it depends on them
        return True
    return relative(floor.whole, now) > largest_floor(floor.unit)
