"""BatchNorm that sees micro-batches where it should see the batch."""

from dataclasses import replace

from anybatch.norms import batch_norms, uses_batch_statistics
from anybatch.proof.causes.experiments import ExperimentResult, Experiments
from anybatch.proof.causes.leftover_state import Repair
from anybatch.proof.floor import largest_floor
from anybatch.proof.verdict import Cause


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
