"""Changes that make a plan fit: each way with the peak that the update would have."""

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
"""Measured on bf16 parameters, to the float64 gradient."""
LOW_SUMS, CHECKPOINTING = 'sums="param"', "checkpointing "
HEAVY = "the optimizer", "fully_shard"
"""How changes begin that need another optimizer, or more cards."""
SCALES_OF_8_BITS = 4 / 256
"""Bytes that a state of 8 bits keeps beside each number: one fp32 scale for 256 of them."""
RANKS = (2, 4, 8)
Change = Callable[[Moment], Moment]


@dataclass(frozen=True, slots=True, kw_only=True)
class WayToFit:
    """One change, or several together, and the peak of the size that was planned with it."""

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
    beside: int,
) -> tuple[WayToFit, ...]:
    """List ways from the least change to the largest, each alone. If none of the cheap ones fits, the fewest that do together.

    `parts` have made an update, so that the optimizer's state is there. `checkpointed` are the moments with `blocks`
    recomputed, none where that cannot be; `beside` is what kernels allocate that fake tensors do not show.
    """
    changes = _changes(parts, blocks if checkpointed else "", is_fp32_sum=is_fp32_sum)

    def way(*names: str) -> WayToFit:
        moments = checkpointed if any(name.startswith(CHECKPOINTING) for name in names) else plain
        done = [changes[name] for name in names]
        peak = beside + highest(reduce(lambda seen, change: change(seen), done, moment) for moment in moments).total
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
    """Changes by name, those that cost least first: a forward, nothing, digits, time of the step, more cards."""
    model, optimizer, _ = parts
    learning = [one for one in model.parameters() if one.requires_grad]
    num_bytes, low = (sum(one.nbytes for one in some) for some in (learning, filter(is_low, learning)))
    # gradients in the dtype of their parameters take this share of what they take as they are summed
    own_share = num_bytes / (num_bytes + low) if is_fp32_sum and num_bytes else 1.0
    largest = 4 * max((one.numel() for one in learning), default=0)  # of all parameters, in fp32
    state_numbers = sum(one.numel() for one in optimizer_tensors(optimizer))
    block_bytes = [sum(one.nbytes for one in block.parameters()) for block in repeated_blocks(model)[1]]
    # a rank of a model whose blocks are sharded gathers two of them at a time, and what belongs to none
    gathered = sum(one.nbytes for one in model.parameters()) - sum(block_bytes) + 2 * max(block_bytes, default=0)

    def by_parameter(moment: Moment) -> Moment:
        """Step one parameter after the other, and copy nothing else."""
        return replace(moment, temporaries=min(moment.temporaries, 3 * largest)) if moment.is_step else moment

    def in_own_dtype(moment: Moment) -> Moment:
        return replace(moment, gradients=int(moment.gradients * own_share))

    def with_state(kept: int, moment: Moment) -> Moment:
        """Keep at most so many bytes of the state, and step parameter by parameter."""
        return by_parameter(replace(moment, optimizer=min(moment.optimizer, kept)))

    def sharded(ranks: int, moment: Moment) -> Moment:
        """Shard each block and the model. While passes accumulate, a rank adds up whole gradients."""
        if moment.is_step:
            shards: dict[str, Any] = {kind: -(-nbytes // ranks) for kind, nbytes in moment.kinds.items()}
            return replace(moment, **{**shards, "inputs": moment.inputs})
        own = in_own_dtype(moment)
        parameters = own.parameters // ranks + min(gathered, own.parameters)
        return replace(own, parameters=parameters, optimizer=own.optimizer // ranks)

    changes: dict[str, Change] = {}
    if blocks:
        changes[CHECKPOINTING + blocks] = lambda moment: moment  # the moments are those of another trial
    if optimizer is not None and any(group.get("foreach") for group in optimizer.param_groups):
        changes["fused=True or foreach=False in the optimizer"] = by_parameter
    if own_share < 1:
        changes[LOW_SUMS] = in_own_dtype
    if state_numbers:
        changes["the optimizer's state in 8 bits"] = partial(with_state, int(state_numbers * (1 + SCALES_OF_8_BITS)))
        changes["the optimizer's state on the host"] = partial(with_state, 0)  # which steps there
    return changes | {f"fully_shard over {ranks} ranks": partial(sharded, ranks) for ranks in RANKS}


def _fewest(way: Callable[..., WayToFit], names: Sequence[str]) -> list[WayToFit]:
    """At most three sets of the fewest changes that fit together."""
    for count in (2, 3, 4):
        fitting = [one for some in combinations(names, count) if not _overlap(some) and (one := way(*some)).fits]
        if fitting:
            return fitting[:3]
    return []


def _overlap(names: Sequence[str]) -> bool:
    """True where two of these change the same: a sharded model sums in its own dtype."""
    is_sharded = any(name.startswith("fully_shard") for name in names)
    return sum(name.startswith(HEAVY) for name in names) > 1 or (LOW_SUMS in names and is_sharded)


def last_sentence(ways: Sequence[WayToFit], *, is_fitting: bool) -> str:
    """Say what to change so that it fits, or that nothing has to be."""
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
