"""What to change so that a plan fits: each way with what it would need, by the parts of the peak."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anybatch.sizes import show_bytes

if TYPE_CHECKING:
    from anybatch.memory.predicting.memory_plan import Plan

PRICE_OF_LOW_SUMS = "0.009 of the gradient after 64 micro-batches, 0.018 after 256, against 0.002 in fp32"
"""Measured on bf16 parameters, to the float64 gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WayToFit:
    """One change, and about what an update of one row needs with it."""

    change: str
    peak: int


def ways_to_fit(plan: "Plan") -> tuple[WayToFit, ...]:
    """Ways from the least change to the largest, for the size that was planned; weights, gradients and state shard evenly."""
    parts, peak = plan.breakdown, plan.peak_bytes
    shared = parts.parameters + parts.gradients + parts.optimizer
    ways = []
    if plan.checkpointing is not None and plan.checkpointing.saved > 0:
        ways.append(WayToFit(change=f"checkpoint {plan.checkpointing.blocks}", peak=plan.checkpointing.peak))
    if plan.low_bytes and plan.sums == "fp32":
        change = f'sums="param", gradients summed in their own dtype (error {PRICE_OF_LOW_SUMS})'
        ways.append(WayToFit(change=change, peak=peak - min(plan.low_bytes, parts.gradients // 2)))
    if parts.optimizer:
        ways.append(WayToFit(change="an optimizer with state of 8 bits", peak=peak - 3 * parts.optimizer // 4))
        ways.append(WayToFit(change="an optimizer whose state is kept on the host", peak=peak - parts.optimizer))
    ways += [
        WayToFit(change=f"fully_shard over {ranks} ranks", peak=peak - shared + shared // ranks) for ranks in (2, 4, 8)
    ]
    return tuple(ways)


def last_sentence(plan: "Plan") -> str:
    """What to change so that it fits, or that nothing has to be."""
    if plan.fits:
        return "Nothing has to be changed for it to fit."
    fitting = [way for way in ways_to_fit(plan) if way.peak <= plan.limit]
    if not fitting:
        return (
            "No single change of these makes one row fit: use shorter rows, or several of them together: "
            + "; ".join(f"{way.change} (about {show_bytes(way.peak)})" for way in ways_to_fit(plan))
        )
    return "Any one of these makes one row fit: " + "; ".join(
        f"{way.change} (about {show_bytes(way.peak)})" for way in fitting
    )
