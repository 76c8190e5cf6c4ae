"""How batches are cut: by the split that was asked for, and by a smaller one after memory ran out."""

from collections.abc import Callable

from anybatch.batches import AsGiven, Batch, Dealt, MicroBatches, Split, Workload, smaller
from anybatch.errors import MemoryLimitError
from anybatch.parallel import Ranks


class Cutting:
    """The cut of one batch after another. Those that come cut already stay as they are until memory runs out."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self._given: Split = AsGiven()

    def cut(self, batch: Batch, workload: Callable[[], Workload]) -> MicroBatches:
        """The micro-batches of `batch`; a split that chooses by the work hears what it is first."""
        split = self._given if isinstance(batch, MicroBatches) else self.split
        choose_for = getattr(split, "choose_for", None)
        if choose_for is not None:
            choose_for(workload(), batch)
        return split.cut(batch)

    def shrink(self, batch: Batch, ran: MicroBatches | None, ranks: Ranks, reason: str) -> None:
        """Cut in smaller micro-batches than `ran` from now on; an error where that is possible on no rank."""
        is_given = isinstance(batch.batch if isinstance(batch, Dealt) else batch, MicroBatches)
        found = None if ran is None else smaller(self._given if is_given else self.split, ran)
        if not ranks.any(found is not None):
            where = "before the first micro-batch ran" if ran is None else "with a single row in each micro-batch"
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
