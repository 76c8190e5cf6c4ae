"""What to change so that a plan fits: each way with what it would need, by the parts of the peak."""

from collections.abc import Sequence
from dataclasses import dataclass

from anybatch.memory.predicting.plan_parts import Breakdown, Checkpointing
from anybatch.sizes import show_bytes

PRICE_OF_LOW_SUMS = "0.009 of the gradient after 64 micro-batches, 0.018 after 256, against 0.002 in fp32"
"""Measured on bf16 parameters, to the float64 gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WayToFit:
    """One change, and about what an update of one row needs with it."""

    change: str
    peak: int


def ways_to_fit(
    parts: Breakdown, peak: int, checkpointing: Checkpointing | None, low_bytes: int
) -> tuple[WayToFit, ...]:
    """Ways from the least change to the largest, for the size that was planned; weights, gradients and state shard evenly.

    `low_bytes` are those of bf16 and fp16 parameters whose gradients are summed in fp32.
    """
    shared = parts.parameters + parts.gradients + parts.optimizer
    ways = []
    if checkpointing is not None and checkpointing.saved > 0:
        ways.append(WayToFit(change=f"checkpoint {checkpointing.blocks}", peak=checkpointing.peak))
    if low_bytes:
        change = f'sums="param", gradients summed in their own dtype (error {PRICE_OF_LOW_SUMS})'
        ways.append(WayToFit(change=change, peak=peak - min(low_bytes, parts.gradients // 2)))
    if parts.optimizer:
        ways.append(WayToFit(change="an optimizer with state of 8 bits", peak=peak - 3 * parts.optimizer // 4))
        ways.append(WayToFit(change="an optimizer whose state is kept on the host", peak=peak - parts.optimizer))
    ways += [
        WayToFit(change=f"fully_shard over {ranks} ranks", peak=peak - shared + shared // ranks) for ranks in (2, 4, 8)
    ]
    return tuple(ways)


def last_sentence(ways: Sequence[WayToFit], limit: int) -> str:
    """What to change so that it fits into `limit` bytes; nothing where there are no ways to tell."""
    if not ways:
        return "Nothing has to be changed for it to fit."
    fitting = [way for way in ways if way.peak <= limit]
    told = "; ".join(f"{way.change} (about {show_bytes(way.peak)})" for way in fitting or ways)
    if not fitting:
        return f"No single change of these makes one row fit: use shorter rows, or several of them together: {told}"
    return f"Any one of these makes one row fit: {told}"
