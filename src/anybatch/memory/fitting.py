"""`Fitting`: what was chosen for batches of one shape, and what it became since."""

from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from anybatch.batches import Rows, Split, Tokens, Workload
from anybatch.memory.batch_shape import BatchShape
from anybatch.memory.predicting import Plan, largest_of
from anybatch.memory.ranking import WayContest, fastest_split
from anybatch.norms import uses_batch_statistics
from anybatch.sizes import show_bytes
from anybatch.torch_inside import BatchNormLayer

WORTH_PLANNING = 0.85
"""Rows shorter than this share of those that were planned for have a plan of their own."""

MUCH_KEPT = 0.1
"""The share of the memory that kernels may keep before it is said."""


@dataclass(slots=True)
class Fitting:
    """What was chosen for batches up to one shape."""

    shape: BatchShape
    split: Split
    kind: Literal["rows", "tokens"]
    size: int
    plan: Plan | None = None
    reason: str = ""
    retries: int = 0
    chosen: int = field(init=False)
    """The largest size that may be come to, and the split for it."""
    asked: Split = field(init=False)

    def __post_init__(self) -> None:
        self.chosen, self.asked = self.size, self.split

    def wastes(self, shape: BatchShape) -> bool:
        """True where rows as short as these could be so many more in a micro-batch that it is worth planning for them."""
        is_cut = isinstance(self.asked, Rows) and shape.rows > self.chosen and not self.reason
        return is_cut and shape.row_elements < WORTH_PLANNING * self.shape.row_elements

    def with_more_rows(self, found: Plan) -> "Fitting":
        """The same for batches of more such rows, of which this was found."""
        assert isinstance(self.asked, Rows | Tokens)
        size = min(found.micro_batch, self.chosen)
        return Fitting(replace(self.shape, rows=found.rows), self.asked.resized(size), self.kind, size, found)

    def make_room(self, kept: int) -> bool:
        """Come to smaller micro-batches where `kept` bytes beside those that were planned reach into half of the margin.

        Half of the memory is left to rows, whatever is kept: kernels of bf16 would take all of a small one. Then there is a
        whole margin again: every new size leaves something behind too, so that sizes change seldom. True where they became
        smaller.
        """
        plan, asked = self.plan, self.asked
        if plan is None or not plan.fits or not isinstance(asked, Rows | Tokens):
            return False
        kept = min(kept, plan.memory // 2)
        peak = plan.whole_bytes if self.chosen >= plan.whole_size else plan.peak(self.chosen)
        if peak + kept <= plan.memory * (1 - plan.margin / 2):
            return False
        one = plan.whole_size // plan.rows
        most = min(self.chosen, plan.whole_size - one)
        self.chosen = max(largest_of(plan.peaks, plan.limit - kept, one, most), one)
        self.asked = asked.resized(self.chosen)
        if self.size > self.chosen:
            self.split, self.size = self.asked, self.chosen
        return True

    def keeps_much(self, kept: int) -> bool:
        """True where so many bytes are worth a word."""
        return self.plan is not None and kept >= MUCH_KEPT * self.plan.memory

    def said_of(self, kept: int) -> str:
        """That kernels take the memory that rows could have, and what to do."""
        return (
            f"kernels of the CPU keep {show_bytes(kept)} for the shapes of micro-batches that they met, and micro-batches "
            f"become smaller for it: {self.size} {self.kind} from now on. Give batches of one size, or bound what they keep: "
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY and LRU_CACHE_CAPACITY in the environment that Python starts in, such as 256 and "
            "16 (docs/memory.md). This is said once."
        )


def fitting_within(
    found: Plan,
    workload: Workload,
    shape: BatchShape,
    *,
    most: Rows | Tokens | None,
    tokens: Tokens | None,
    is_fastest: bool,
) -> Fitting:
    """The split for what was predicted, at most `most`; where memory seems not to suffice for a row, a row is tried."""
    split: Rows | Tokens
    if tokens is None:
        largest = most.size if isinstance(most, Rows) else found.rows
        size = max(min(found.micro_batch, largest), 1)
        split = Rows(size) if is_fastest else Rows(size, tail=_least_tail(workload.model, size))
    else:
        largest = tokens.budget if most is tokens else found.whole_size
        size = max(min(found.micro_batch, largest), found.whole_size // found.rows)
        split = tokens.with_budget(size)
    chosen = fastest_split(found, workload.model, split, largest) if is_fastest else split
    size = chosen.most if isinstance(chosen, WayContest) else size
    return Fitting(shape, chosen, "rows" if tokens is None else "tokens", size, found)


def _least_tail(model: nn.Module, size: int) -> int:
    """The fewest rows of a last micro-batch: a quarter of the others where it has statistics of its own, else 2."""
    norms = [one for one in model.modules() if isinstance(one, BatchNormLayer) and uses_batch_statistics(one)]
    return max(size // 4, 2) if norms else 2
