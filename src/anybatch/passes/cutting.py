"""How batches are cut: by the split that was asked for, and by a smaller one after memory ran out."""

from collections.abc import Callable, Sequence

from torch import nn

from anybatch.batches import (
    AsGiven,
    Batch,
    Dealt,
    MicroBatches,
    SampleList,
    Split,
    Workload,
    check_row_dim,
    holds_samples,
    rows,
    smaller,
)
from anybatch.errors import MemoryLimitError
from anybatch.noise import UNMEASURED, PassMeter
from anybatch.objectives import Coupled, Objective, count_units
from anybatch.parallel import Ranks


class Cutting:
    """The cut of one batch after another. Those that come cut already stay as they are until memory runs out."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self._given: Split = AsGiven()
        self._has_samples = False
        """True once a list was surely one of samples: later ones that are short and equally long are read so too."""
        self._is_row_dim_known = False

    def cut(self, batch: Batch, workload: Callable[[], Workload], meter: PassMeter = UNMEASURED) -> MicroBatches:
        """The micro-batches of `batch`; a split that chooses by the work hears what it is first."""
        if isinstance(batch, MicroBatches):
            return self._given.cut(batch)
        if type(batch) is list and getattr(self.split, "collate", None) is None:
            self._has_samples = self._has_samples or holds_samples(batch)
            batch = SampleList(batch) if self._has_samples else batch
        choose_for = getattr(self.split, "choose_for", None)
        if choose_for is not None:
            choose_for(workload(), batch)
        cut = meter.cut(self.split, batch, self.split.cut(batch))
        if not self._is_row_dim_known and len(cut) > 1:
            self._is_row_dim_known = True
            if getattr(self.split, "reads_dim_0", False):
                check_row_dim(workload().model, batch)
        return cut

    def shrink(self, batch: Batch, ran: MicroBatches | None, ranks: Ranks, reason: str) -> None:
        """Cut in smaller micro-batches than `ran` from now on; an error where that is possible on no rank."""
        is_given = isinstance(batch.batch if isinstance(batch, Dealt) else batch, MicroBatches)
        found = None if ran is None else smaller(self._given if is_given else self.split, ran)
        if not ranks.any(found is not None):
            where = "before the first micro-batch ran" if ran is None else _least(ran)
            need = getattr(self.split, "need", None)
            predicted = "" if need is None else f" An update with one row needs {need}, as predicted."
            raise MemoryLimitError(
                f"memory ran out {where} ({reason}).{predicted} Gradients, buffers and random state are as they were. Use "
                "shorter rows, autocast=torch.bfloat16, torch.utils.checkpoint inside the model, or a smaller model."
            )
        if found is None:
            return  # other ranks can make theirs smaller
        if is_given:
            self._given = found
        else:
            self.split = found


def _least(ran: MicroBatches) -> str:
    """Why micro-batches that ran cannot be made smaller."""
    if ran.whole:
        return "in micro-batches that must stay whole (MicroBatches(whole=True))"
    if ran.together > 1:
        return f"in micro-batches of {ran.together} rows that belong together (groups=), which are never torn"
    return "with a single row in each micro-batch"


def units_of(objective: Objective | Coupled, model: nn.Module, cut: MicroBatches) -> Sequence[float]:
    """What each micro-batch's loss averages over; rows as they were cut, in whatever dim micro-batches have them."""
    if objective.units is rows and objective.units_for is None and cut.cut is not None:
        return [len(numbers) for numbers in cut.cut.rows]
    return count_units(objective, model, cut.micro_batches)
