"""What to change so that a plan fits: each way with the peak that the update would have."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
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
LOW_SUMS = 'sums="param"'
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBytes:
    """What ways depend on, of a model and its optimizer, in bytes."""

    low: int
    """Parameters in bf16 or fp16 that learn."""
    learning: int
    """All parameters that learn."""
    largest: int
    """The largest parameter, in fp32."""
    gathered: int
    """What one rank gathers at a time of a model whose blocks are sharded: two blocks, and what belongs to none."""
    state_numbers: int
    """How many numbers the optimizer keeps."""
    is_fp32_sum: bool
    is_over_lists: bool
    """True where the step takes all parameters at once, and copies them on the way."""

    @property
    def own_gradients(self) -> float:
        """What gradients in the dtype of their parameters take of what they take as they are summed."""
        return self.learning / (self.learning + self.low) if self.is_fp32_sum and self.learning else 1.0

    def in_own_dtype(self, moment: Moment) -> Moment:
        """Gradients summed in the dtype of their parameters."""
        return replace(moment, gradients=int(moment.gradients * self.own_gradients))

    def in_8_bits(self, moment: Moment) -> Moment:
        """Each number of the state in 8 bits, stepped parameter by parameter in fp32."""
        kept = min(moment.optimizer, int(self.state_numbers * (1 + SCALES_OF_8_BITS)))
        return self.by_parameter(replace(moment, optimizer=kept))

    def on_the_host(self, moment: Moment) -> Moment:
        """The state on the host, where the step is taken too: gradients go there and parameters come back one by one."""
        return self.by_parameter(replace(moment, optimizer=0))

    def over_ranks(self, ranks: int) -> Change:
        """`fully_shard` of each block and of the model. While passes accumulate, a rank adds up whole gradients."""

        def sharded(moment: Moment) -> Moment:
            if moment.is_step:
                shards: dict[str, Any] = {kind: -(-nbytes // ranks) for kind, nbytes in moment.kinds.items()}
                return replace(moment, **{**shards, "inputs": moment.inputs})
            own = self.in_own_dtype(moment)
            parameters = own.parameters // ranks + min(self.gathered, own.parameters)
            return replace(own, parameters=parameters, optimizer=own.optimizer // ranks)

        return sharded

    def by_parameter(self, moment: Moment) -> Moment:
        """A step that takes one parameter after the other, and copies nothing else."""
        return replace(moment, temporaries=min(moment.temporaries, 3 * self.largest)) if moment.is_step else moment


def model_bytes(parts: Parts, *, is_fp32_sum: bool) -> ModelBytes:
    """Of parts that have made an update, so that the optimizer's state is there."""
    model, optimizer, _ = parts
    learning = [one for one in model.parameters() if one.requires_grad]
    repeated = repeated_blocks(model)
    blocks = [] if repeated is None else [sum(one.nbytes for one in block.parameters()) for block in repeated[1]]
    whole = sum(one.nbytes for one in model.parameters())
    return ModelBytes(
        low=sum(one.nbytes for one in learning if is_low(one)),
        learning=sum(one.nbytes for one in learning),
        largest=4 * max((one.numel() for one in learning), default=0),
        gathered=whole - sum(blocks) + 2 * max(blocks, default=0),
        state_numbers=0 if optimizer is None else sum(one.numel() for one in optimizer_tensors(optimizer)),
        is_fp32_sum=is_fp32_sum,
        is_over_lists=optimizer is not None and any(group.get("foreach") for group in optimizer.param_groups),
    )


def find_ways(
    plain: Moments, checkpointed: Moments, blocks: str, sizes: ModelBytes, *, limit: int, beside: int
) -> tuple[WayToFit, ...]:
    """Ways from the least change to the largest, each alone. Where none of the cheap ones fits, the fewest that do together.

    `checkpointed` are the moments with `blocks` recomputed, none where that cannot be; `beside` is what kernels allocate that
    fake tensors do not show.
    """
    changes = _changes(blocks if checkpointed else "", sizes)

    def way(*names: str) -> WayToFit:
        moments = checkpointed if any(changes[name] is recomputed for name in names) else plain
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


def _fewest(way: Callable[..., WayToFit], names: Sequence[str]) -> list[WayToFit]:
    """Of the fewest changes that fit together, at most three sets."""
    for count in (2, 3, 4):
        fitting = [one for some in combinations(names, count) if not _overlap(some) and (one := way(*some)).fits]
        if fitting:
            return fitting[:3]
    return []


def _changes(blocks: str, sizes: ModelBytes) -> dict[str, Change]:
    """By what they are called, those that cost least first: a forward, nothing, digits, time of the step, more cards."""
    changes: dict[str, Change] = {f"checkpointing {blocks}": recomputed} if blocks else {}
    if sizes.is_over_lists:
        changes["fused=True or foreach=False in the optimizer"] = sizes.by_parameter
    if sizes.own_gradients < 1:
        changes[LOW_SUMS] = sizes.in_own_dtype
    if sizes.state_numbers:
        changes["the optimizer's state in 8 bits"] = sizes.in_8_bits
        changes["the optimizer's state on the host"] = sizes.on_the_host
    return changes | {f"fully_shard over {ranks} ranks": sizes.over_ranks(ranks) for ranks in RANKS}


def _overlap(names: Sequence[str]) -> bool:
    """True where two of these change the same: a sharded model sums in its own dtype."""
    return sum(name.startswith(HEAVY) for name in names) > 1 or (
        LOW_SUMS in names and any(name.startswith("fully_shard") for name in names)
    )


def recomputed(moment: Moment) -> Moment:
    """Blocks that run again in backward: the moments are those of another trial."""
    return moment


def last_sentence(ways: Sequence[WayToFit], *, is_fitting: bool) -> str:
    """What to change so that it fits, or that nothing has to be."""
    if is_fitting:
        return "Nothing has to be changed for it to fit."
    fitting = [f"{way.change} ({show_bytes(way.peak)})" for way in ways if way.fits]
    sharded = [index for index, said in enumerate(fitting) if said.startswith("fully_shard")]
    fitting = [said for index, said in enumerate(fitting) if index not in sharded[1:]]
    if fitting:
        price = f" {LOW_SUMS} is off by {PRICE_OF_LOW_SUMS}." if LOW_SUMS in str(fitting) else ""
        return "Any of these makes one row fit: " + "; ".join(fitting) + f".{price}"
    least = min(ways, key=lambda way: way.peak, default=None)
    known = "" if least is None else f" The least is {show_bytes(least.peak)}, with {least.change}."
    return f"Nothing here makes one row fit: use shorter rows, or a smaller model.{known}"
