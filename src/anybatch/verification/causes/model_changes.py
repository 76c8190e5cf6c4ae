"""Causes in what a forward changes: state, the rows it was given, and statistics of BatchNorm."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from anybatch.batch_norm import batch_norms, uses_batch_statistics
from anybatch.core import Batch, Coupled, NormLayer, map_tensors, tensors
from anybatch.verification.case import Case
from anybatch.verification.causes.experiments import ExperimentResult, Experiments
from anybatch.verification.copies import ModelState, functions_of
from anybatch.verification.floor import largest_floor
from anybatch.verification.verdict import Cause

RANDOM_FIX = (
    "Draw from torch's generator (torch.rand, torch.randn, F.dropout), which can be replayed, or put the numbers into "
    "the batch, one entry per row."
)
STATE_FIX = (
    "Let forward depend on parameters, rows and torch's generators alone. Count updates outside the model, for "
    "example after update(batch), and keep running statistics out of the training forward's output."
)
Repair = tuple[Cause, Case, ExperimentResult]
"""A cause, the case without it, and what came of that."""


def find_model_state(experiments: Experiments, before: ExperimentResult) -> Repair | None:
    """Look at what a forward changes; put it back before every micro-batch, and see whether the error goes."""
    changed, moved, _ = forward_changes(experiments)
    if not changed and not moved:
        return None
    repaired = replace(experiments.case, restores_state=True)
    after = experiments.try_out(repaired)
    if not after.explains(before) or not changed:
        return None
    cause = Cause(
        kind="state",
        explanation=f"A forward changes {', '.join(changed[:4])}, once per micro-batch instead of once per batch. With "
        f"the state put back before each micro-batch the error falls from {before.error:.1e} to {after.error:.1e}.",
        fix=STATE_FIX,
    )
    return cause, repaired, after


def find_changed_inputs(experiments: Experiments, before: ExperimentResult) -> Repair | None:
    """Look at whether the rows are as they were after a forward; give every forward a copy, and see whether the error goes."""
    written = _written_inputs(experiments)
    if not written:
        return None
    repaired = replace(experiments.case, copies_inputs=True)
    after = experiments.try_out(repaired)
    if not after.explains(before):
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
    """Look for random generators that the model or the loss holds and that a forward moves."""
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
    """Names of what one forward changes."""

    state: list[str]
    """All state but running statistics."""
    generators: list[str]
    """Random generators of Python and NumPy."""
    outside: list[str]
    """State outside of the model and of callable objects, which no run puts back: closures, globals, default arguments."""


def forward_changes(experiments: Experiments) -> ForwardChanges:
    """Run one micro-batch and compare what it can reach before and after."""
    found: list[ForwardChanges] = []
    case = experiments.case

    def watch(model: nn.Module) -> Callable[[], None]:
        state = ModelState.of(model, functions_of(case.objective))
        norms = {name for name, module in model.named_modules() if isinstance(module, NormLayer)}

        def look() -> None:
            changed = [text for name, text in state.changed().items() if name.rpartition(".")[0] not in norms]
            python = state.python
            found.append(ForwardChanges(changed, python.moved_generators(), python.changed(is_left=True)))

        return look

    case.once(experiments.cut[0], experiments.cut.row_numbers[0], watch)
    return found[0]


def _written_inputs(experiments: Experiments) -> list[str]:
    """Paths are not known here: tensors are named by their shapes."""
    written: list[str] = []

    def spy(function: Callable[[nn.Module, Batch], Any]) -> Callable[[nn.Module, Batch], Any]:
        def spied(model: nn.Module, batch: Batch) -> Any:
            before = map_tensors(batch, torch.clone)
            result = function(model, batch)
            for old, new in zip(tensors(before), tensors(batch), strict=True):
                if not torch.equal(old, new):
                    written.append(f"a tensor of shape {tuple(new.shape)}")
            return result

        return spied

    objective = experiments.case.objective
    spied = (
        replace(objective, encode=spy(objective.encode))
        if isinstance(objective, Coupled)
        else replace(objective, loss=spy(objective.loss))
    )
    replace(experiments.case, objective=spied).once(experiments.cut[0], experiments.cut.row_numbers[0])
    return written


def find_batch_norm(experiments: Experiments, before: ExperimentResult) -> Repair | None:
    """Pool the statistics over the whole batch, and see whether the error goes."""
    layers = [name for name, layer in batch_norms(experiments.case.model).items() if uses_batch_statistics(layer)]
    if not layers or experiments.case.batch_norm in ("exact", "frozen"):
        return None
    repaired = replace(experiments.case, batch_norm="exact")
    after = experiments.try_out(repaired)
    # it is a cause whenever it changes the gradient, even where others hide what it takes away
    if after.failure is not None or abs(after.error - before.error) <= largest_floor(experiments.floor.unit):
        return None
    named = ", ".join(map(repr, layers[:3])) + (", ..." if len(layers) > 3 else "")
    plural = "s" if len(layers) > 1 else ""
    is_seen = after.explains(before)
    effect = (
        f"the error falls from {before.error:.1e} to {after.error:.1e}" if is_seen else "the gradient is another one"
    )
    cause = Cause(
        kind="batch_norm",
        explanation=f"{len(layers)} BatchNorm layer{plural} ({named}) took the statistics of each micro-batch instead "
        f"of the batch's. Pooled over the whole batch {effect}.",
        fix="Use batch_norm='exact'; or batch_norm='frozen' where the running statistics are to be used; or GroupNorm, "
        "whose rows do not look at each other.",
    )
    return cause, repaired, after
