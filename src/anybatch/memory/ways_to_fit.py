"""Changes that save memory, each with the predicted peak."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import combinations
from typing import Any

from anybatch.core import is_low
from anybatch.display import show_bytes
from anybatch.memory.checkpointing import repeated_blocks
from anybatch.memory.meter import optimizer_tensors
from anybatch.memory.probe import Parts
from anybatch.memory.recorder import Moment, Moments, highest

PRICE_OF_LOW_SUMS = "0.009 of the gradient after 64 micro-batches, 0.018 after 256, against 0.002 in fp32"
"""Error of sums in bf16, measured against the float64 gradient."""
LOW_SUMS, CHECKPOINTING = 'sums="param"', "checkpointing "
HEAVY = "the optimizer", "fully_shard"  # prefixes of changes that need another optimizer or more devices
SCALES_OF_8_BITS = 4 / 256  # bytes per number for the scales of 8-bit state: one fp32 scale per 256 numbers
RANKS = (2, 4, 8)
Change = Callable[[Moment], Moment]


@dataclass(frozen=True, slots=True, kw_only=True)
class WayToFit:
    """One change, or several together, and the peak with it."""

    change: str
    peak: int
    fits: bool


def find_ways(
    parts: Parts,
    plain: Moments,
    checkpointed: Moments,
    blocks: str,
    *,
    is_fp32_sum: bool,
    limit: int,
    kernel_bytes: int,
) -> tuple[WayToFit, ...]:
    """List single changes, the cheapest first; if no cheap one fits, also the smallest combinations that fit.

    `parts` have run an update, so that the optimizer has its state. `checkpointed` are the moments with `blocks` recomputed,
    empty if that is not possible. `kernel_bytes` is memory of kernels that fake tensors do not show.
    """
    changes = _changes(parts, blocks if checkpointed else "", is_fp32_sum=is_fp32_sum)

    def way(*names: str) -> WayToFit:
        moments = checkpointed if any(name.startswith(CHECKPOINTING) for name in names) else plain
        done = [changes[name] for name in names]
        peak = (
            kernel_bytes + highest(reduce(lambda seen, change: change(seen), done, moment) for moment in moments).total
        )
        return WayToFit(change=" and ".join(names), peak=peak, fits=peak <= limit)

    single = [way(name) for name in changes]
    cheap = [name for name in changes if not name.startswith(HEAVY)]
    if any(one.fits for one in single[: len(cheap)]):
        return tuple(single)
    together = _fewest(way, cheap)
    if not together and not any(one.fits for one in single):
        together = _fewest(way, list(changes))
    return (*single, *together)


def _changes(parts: Parts, blocks: str, *, is_fp32_sum: bool) -> dict[str, Change]:
    """Return changes by name, the cheapest first."""
    model, optimizer, _ = parts
    learning = [one for one in model.parameters() if one.requires_grad]
    num_bytes, low = (sum(one.nbytes for one in some) for some in (learning, filter(is_low, learning)))
    # size of gradients in their parameters' dtype, relative to the sums
    own_share = num_bytes / (num_bytes + low) if is_fp32_sum and num_bytes else 1.0
    largest = 4 * max((one.numel() for one in learning), default=0)  # largest parameter in fp32
    state_numbers = sum(one.numel() for one in optimizer_tensors(optimizer))
    block_bytes = [sum(one.nbytes for one in block.parameters()) for block in repeated_blocks(model)[1]]
    # a sharded model gathers two blocks at a time, and the parameters outside of blocks
    gathered = sum(one.nbytes for one in model.parameters()) - sum(block_bytes) + 2 * max(block_bytes, default=0)

    def by_parameter(moment: Moment) -> Moment:
        return replace(moment, temporaries=min(moment.temporaries, 3 * largest)) if moment.is_step else moment

    def in_own_dtype(moment: Moment) -> Moment:
        return replace(moment, gradients=int(moment.gradients * own_share))

    def with_state(kept: int, moment: Moment) -> Moment:
        """Keep at most this many bytes of optimizer state, and step one parameter at a time."""
        return by_parameter(replace(moment, optimizer=min(moment.optimizer, kept)))

    def sharded(ranks: int, moment: Moment) -> Moment:
        """Shard each block and the model. While accumulating, a rank holds unsharded gradients."""
        if moment.is_step:
            shards: dict[str, Any] = {kind: -(-nbytes // ranks) for kind, nbytes in moment.kinds.items()}
            return replace(moment, **{**shards, "inputs": moment.inputs})
        own = in_own_dtype(moment)
        parameters = own.parameters // ranks + min(gathered, own.parameters)
        return replace(own, parameters=parameters, optimizer=own.optimizer // ranks)

    changes: dict[str, Change] = {}
    if blocks:
        changes[CHECKPOINTING + blocks] = lambda moment: moment  # `checkpointed` has the moments
    if optimizer is not None and any(group.get("foreach") for group in optimizer.param_groups):
        changes["fused=True or foreach=False in the optimizer"] = by_parameter
    if own_share < 1:
        changes[LOW_SUMS] = in_own_dtype
    if state_numbers:
        changes["the optimizer's state in 8 bits"] = partial(with_state, int(state_numbers * (1 + SCALES_OF_8_BITS)))
        changes["the optimizer's state on the host"] = partial(with_state, 0)
    return changes | {f"fully_shard over {ranks} ranks": partial(sharded, ranks) for ranks in RANKS}


def _fewest(way: Callable[..., WayToFit], names: Sequence[str]) -> list[WayToFit]:
    """Return up to three of the smallest combinations that fit."""
    for count in (2, 3, 4):
        fitting = [one for some in combinations(names, count) if not _overlap(some) and (one := way(*some)).fits]
        if fitting:
            return fitting[:3]
    return []


def _overlap(names: Sequence[str]) -> bool:
    """Return True if two of these change the same memory: a sharded model sums in its own dtype."""
    is_sharded = any(name.startswith("fully_shard") for name in names)
    return sum(name.startswith(HEAVY) for name in names) > 1 or (LOW_SUMS in names and is_sharded)


def last_sentence(ways: Sequence[WayToFit], *, is_fitting: bool) -> str:
    """Describe the changes that make one row fit."""
    if is_fitting:
        return "Nothing has to be changed for it to fit."
    fitting = [f"{way.change} ({show_bytes(way.peak)})" for way in ways if way.fits]
    sharded = [said for said in fitting if said.startswith("fully_shard")]
    fitting = [said for said in fitting if said not in sharded[1:]]
    if fitting:
        price = f" {LOW_SUMS} is off by {PRICE_OF_LOW_SUMS}." if LOW_SUMS in str(fitting) else ""
        return "Any of these makes one row fit: " + "; ".join(fitting) + f".{price}"
    least = min(ways, key=lambda way: way.peak, default=None)
    known = "" if least is None else f" The least is {show_bytes(least.peak)}, with {least.change}."
    return f"Nothing here makes one row fit: use shorter rows, or a smaller model.{known}"
