"""How batches are cut: by the split that was asked for, and by a smaller one after memory ran out."""

import warnings
from collections.abc import Callable

from anybatch.core.batch import check_row_dim
from anybatch.core.events import Resize
from anybatch.core.micro_batches import Dealt, MicroBatches, Split, Workload, in_arrival_order
from anybatch.core.nesting import Batch
from anybatch.core.ranks import Ranks
from anybatch.core.shrinking import AsGiven, size_that_ran, smaller
from anybatch.core.telling import Events
from anybatch.core.way_back import WayBack
from anybatch.errors import BatchError, MemoryLimitError, levels_to_the_caller


class Cutting:
    """The cut of one batch after another. Those that come cut already stay as they are until memory runs out."""

    def __init__(self, split: Split, free: Callable[[], int | None] = lambda: None) -> None:
        self.split = split
        self._free = free
        """How much memory is free where the model is; None where nobody tells."""
        self._given: Split = AsGiven()
        self._asked: Split | None = None
        """What batches were cut by before memory ran out; None where they still are."""
        self._bound = 0
        """The largest micro-batch that it allowed then, where an even cut to it may have made what failed; else 0."""
        self._way_back = WayBack()
        self._has_warned = False
        self._is_row_dim_known = False

    def cut(self, batch: Batch, workload: Callable[[], Workload], *, as_they_came: bool = False) -> MicroBatches:
        """The micro-batches of `batch`; a split that chooses by the work hears what it is first."""
        if isinstance(batch, MicroBatches):
            return self._given.cut(batch)
        choose_for = self.split.choose_for
        if choose_for is not None:
            choose_for(workload(), batch)
        cut = self.split.cut(batch)
        if as_they_came:
            cut = in_arrival_order(self.split, batch, cut)
        if not self._is_row_dim_known and len(cut) > 1:
            self._is_row_dim_known = True
            if self.split.reads_dim_0:
                check_row_dim(workload().model, batch)
        return cut

    def again(self, batch: Batch, ranks: Ranks) -> Callable[[MicroBatches | None, str], None]:
        """What is called, with what ran and why it failed, each time that this batch has to start again.

        It makes micro-batches smaller. Where none can be, they are tried once more as they are, because it may have been
        somebody else's memory; then it is an error, and the next batch is cut as this one was at first.
        """
        split, first, is_last = self.split, None, False

        def start_again(ran: MicroBatches | None, reason: str) -> None:
            nonlocal first, is_last
            first = first or ran
            try:
                is_last = not self._shrink(batch, ran, ranks, reason, free=self._free(), is_last=is_last)
            except MemoryLimitError:
                self._as_before(split, first)
                raise

        return start_again

    def _shrink(
        self, batch: Batch, ran: MicroBatches | None, ranks: Ranks, reason: str, *, free: int | None, is_last: bool
    ) -> bool:
        """Cut in smaller micro-batches than `ran` from now on; where no rank can, False, or an error if `is_last`."""
        is_given = isinstance(batch.batch if isinstance(batch, Dealt) else batch, MicroBatches)
        before, size = self.split, None if ran is None or is_given else _size(self.split, ran)
        bound = 0 if size is None else before.bound
        found = None if ran is None else smaller(self._given if is_given else self.split, ran)
        if not ranks.any(found is not None):
            if not is_last:
                return False
            where = "before the first micro-batch ran" if ran is None else _least(ran)
            need = self.split.need
            predicted = "" if need is None else f" An update with one row needs {need}, as predicted."
            raise MemoryLimitError(
                f"memory ran out {where} ({reason}).{predicted} Gradients, buffers and random state are as they were. Use "
                "shorter rows, autocast=torch.bfloat16, torch.utils.checkpoint inside the model, or a smaller model."
            )
        if found is None:
            return True  # other ranks can make theirs smaller
        if is_given:
            self._given = found
            return True
        self.split = found
        if size is not None:
            if self._asked is None:
                self._asked, self._bound = before, bound if bound < 2 * size else 0
            self._way_back.fail(size, free)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"memory ran out ({reason}), and the batch started again in smaller micro-batches: {self.split!r} from now on. "
                "They grow again after batches that go well. Nothing is lost; this is said once.",
                stacklevel=levels_to_the_caller(),
            )
        return True

    def went_well(self, ran: MicroBatches | None, events: Events) -> None:
        """A batch fitted at once; where memory had run out before, the next one may be cut larger, and that is told."""
        if self._asked is None or ran is None or len(ran) == 1:
            return
        # a split that tunes may have run less than it was allowed
        size = self.split.bound or _size(self.split, ran)
        following = 0 if size is None else self._way_back.succeed(size, self._free)
        if size is not None and following > size and self._grow(self._asked, following):
            events.begin(Resize)
            events.end(Resize, split=repr(self.split))

    def _grow(self, asked: Split, size: int) -> bool:
        """Cut in micro-batches of up to `size`, or as was asked where that is as much; False of a split that knows no sizes."""
        resized = self.split.resized
        if size < self._way_back.highest:
            self.split = self.split if resized is None else resized(size)
            return resized is not None
        self.split = asked if asked is not self.split or resized is None else resized(max(size, self._bound))
        self._asked = None
        self._way_back.arrive()
        return True

    def _as_before(self, split: Split, ran: MicroBatches | None) -> None:
        """Cut by `split` again, which cut `ran`: what did not fit in any size says nothing of sizes."""
        size = None if ran is None else _size(split, ran)
        resized = split.resized
        # a split that changes itself is told the size that it had
        self.split = resized(size) if split is self.split and resized is not None and size is not None else split
        if self._asked is split:
            self._asked = None
            self._way_back.arrive()


def _size(split: Split, ran: MicroBatches) -> int | None:
    try:
        return size_that_ran(split, ran)
    except BatchError:
        return None  # micro-batches of the user's own making, whose rows nobody can count


def _least(ran: MicroBatches) -> str:
    """Why micro-batches that ran cannot be made smaller."""
    if ran.whole:
        return "in micro-batches that must stay whole (MicroBatches(whole=True))"
    if ran.together > 1:
        return f"in micro-batches of {ran.together} rows that belong together (groups=), which are never torn"
    return "with a single row in each micro-batch"
