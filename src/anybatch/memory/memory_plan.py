"""`Plan`: the memory that an update will need, known before it runs."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from anybatch.display import facts_table, html_block, html_table, sentences, show_bytes
from anybatch.memory.envelope import Peaks
from anybatch.memory.ways_to_fit import PRICE_OF_LOW_SUMS, WayToFit, last_sentence

Method = Literal["fake tensors", "real steps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """What the memory at the peak is made of, in bytes."""

    parameters: int
    """Parameters and buffers."""
    gradients: int
    optimizer: int
    activations: int
    """What forward left for backward."""
    inputs: int
    temporaries: int
    """All else that lives at that moment: what one op hands to the next."""

    @property
    def total(self) -> int:
        """The peak."""
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class SizePeak:
    """The predicted peak of one micro-batch size."""

    size: int
    """Rows, or tokens."""
    peak: int
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """What recomputing each block of the model in backward, instead of keeping what it saved, would change."""

    blocks: str
    """Which modules: their path, how many, of what kind."""
    size: int
    """The micro-batch that is compared."""
    peak: int
    """With checkpointing."""
    saved: int
    """Bytes less than without it; 0 where it does not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The peak memory of a whole update for any micro-batch size, and the largest that fits.

    Sizes are rows, or tokens of a `Tokens` split (`unit`). A peak counts parameters, buffers, gradients that live from
    micro-batch to micro-batch, the optimizer's state, activations, temporaries, and the batch where it lies in that memory.
    """

    unit: Literal["rows", "tokens"]
    micro_batch: int
    """The largest that fits; 0: not even one row does."""
    peak_bytes: int
    """The peak at that size; where nothing fits, the peak of one row."""
    rows: int
    """The rows of the batch."""
    whole_size: int
    """The size of the batch in one piece: rows, or padded tokens."""
    whole_bytes: int
    """The peak of the batch in one piece."""
    least_bytes: int
    """The peak of the smallest micro-batch: one row."""
    memory: int
    """All the memory there is, in bytes."""
    margin: float
    """The share of it that is left free."""
    device: str
    sizes: tuple[SizePeak, ...]
    breakdown: Breakdown
    checkpointing: Checkpointing | None
    method: Method
    reason: str
    """Why this method."""
    is_confirmed: bool
    """True where the size chosen was itself tried, and its peak is not computed from others."""
    notes: tuple[str, ...]
    peaks: Peaks = field(repr=False)
    sums: Literal["fp32", "param"] = "fp32"
    """What gradients of bf16 and fp16 parameters are summed in."""
    ways_to_fit: tuple[WayToFit, ...] = ()
    """What could be changed, with the peak of `micro_batch`, or of one row where nothing fits."""

    def __repr__(self) -> str:
        size = f"{self.micro_batch} {self.unit}" if self.fits else "nothing fits"
        peak = f"{show_bytes(self.peak_bytes)} of {show_bytes(self.limit)}"
        return (
            f"Plan({size}, peak {peak}, whole batch of {self.rows} rows {show_bytes(self.whole_bytes)}, {self.method})"
        )

    def _repr_html_(self) -> str:
        head, _, *rest = _sentences(self)
        sizes = [[entry.size, show_bytes(entry.peak), "yes" if entry.fits else "no"] for entry in self.sizes]
        parts = {part.name: show_bytes(getattr(self.breakdown, part.name)) for part in fields(self.breakdown)}
        tables = html_table([self.unit, "peak", "fits"], sizes), sentences(["At the peak:"]), facts_table(parts)
        return html_block(head, *tables, sentences(rest))

    @property
    def limit(self) -> int:
        """The highest peak that fits: the memory without the margin."""
        return int(self.memory * (1 - self.margin))

    @property
    def fits(self) -> bool:
        """True if some micro-batch does."""
        return self.micro_batch > 0

    @property
    def needs_accumulation(self) -> bool:
        """True where the whole batch in one piece does not fit."""
        return self.whole_bytes > self.limit

    def peak(self, size: int) -> int:
        """The predicted peak of an update in micro-batches of `size` rows, or at most `size` tokens.

        For a batch like the one that was planned for, in more than one micro-batch; `whole_bytes` is for one. Where sizes
        could only be tried one by one, it is the peak of the next larger one that was.
        """
        return self.peaks.peak(size)

    def outside(self, size: int) -> int:
        """Of `peak(size)`, what lies outside torch's allocator: the nodes of the graph, what each micro-batch leaves.

        Counted on the CPU, where it lies in the same memory: some 1,000 bytes a node and 2,000 a micro-batch.
        """
        return self.peaks.outside(size)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: everything but the curves."""
        found = {name: value for name, value in asdict(self).items() if name != "peaks"}
        return found | {"limit": self.limit, "fits": self.fits, "needs_accumulation": self.needs_accumulation}

    def describe(self) -> str:
        """The plan in sentences."""
        return "\n".join(_sentences(self))


def _sentences(plan: Plan) -> list[str]:
    limit = f"{show_bytes(plan.memory)} less {plan.margin:.0%} margin"
    if not plan.fits:
        head = (
            f"Not even one row fits: it needs {show_bytes(plan.least_bytes)}, and there is {limit} "
            f"({show_bytes(plan.limit)}) on {plan.device}."
        )
    elif not plan.needs_accumulation:
        head = (
            f"The whole batch of {plan.rows} rows fits in one piece: {show_bytes(plan.whole_bytes)} of {limit} on "
            f"{plan.device}. Accumulation is not needed."
        )
    else:
        head = (
            f"The largest micro-batch that fits is {plan.micro_batch} {plan.unit}: {show_bytes(plan.peak_bytes)} of {limit} "
            f"on {plan.device}. The whole batch of {plan.rows} rows in one piece would need {show_bytes(plan.whole_bytes)}."
        )
    parts = ", ".join(
        f"{part.name} {show_bytes(getattr(plan.breakdown, part.name))}" for part in fields(plan.breakdown)
    )
    lines = [head, f"Of it: {parts}."]
    if plan.checkpointing is not None:
        lines.append(checkpointing_sentence(plan.checkpointing, plan.unit))
    confirmed = "tried at the size chosen" if plan.is_confirmed else "not tried at the size chosen"
    lines.append(f"Predicted with {plan.method}, {confirmed}: {plan.reason}.")
    if plan.sums == "param":
        lines.append(f"Gradients are summed in the parameters' own dtype: off by {PRICE_OF_LOW_SUMS}.")
    return [*lines, *plan.notes, last_sentence(plan.ways_to_fit, is_fitting=plan.fits)]


def checkpointing_sentence(found: Checkpointing, unit: str) -> str:
    """What gradient checkpointing would save."""
    size = f"a micro-batch of {found.size} {unit if found.size != 1 else unit.removesuffix('s')}"
    if found.saved <= 0:
        return f"Checkpointing {found.blocks} would save nothing at {size}."
    return (
        f"Checkpointing {found.blocks} would save {show_bytes(found.saved)} at {size} (peak {show_bytes(found.peak)}), for a "
        "second forward of each."
    )
