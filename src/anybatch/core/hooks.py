"""Hooks: how BatchNorm statistics, row-keyed dropout, spectral norm, noise and timing take part in the passes of a batch."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from anybatch.core.batch import Batch
from anybatch.core.splits import MicroBatches

NOTHING: AbstractContextManager[object] = nullcontext()


class PassHook:
    """Takes part in the passes of one batch. A method that a subclass leaves out does nothing.

    A batch without hooks calls none of this: the list of hooks is empty.
    """

    needs_all_rows = False
    """True if micro-batches without targets have to run too, because their rows count for the hook."""

    def around_batch(self) -> AbstractContextManager[object]:
        """Surround all passes of the batch."""
        return NOTHING

    def around_counted(self) -> AbstractContextManager[object]:
        """Surround the passes that count once for each micro-batch: of a coupled loss, the first of its two."""
        return NOTHING

    def before_pass(self) -> None:
        """Prepare for the next micro-batch."""

    def around_forward(self, micro_batch: int) -> AbstractContextManager[object]:
        """Surround the forward of one micro-batch."""
        return NOTHING

    def in_lockstep(self, current: Callable[[], int]) -> AbstractContextManager[object]:
        """Surround forwards that are under way at the same time; `current()` is the number of the one that runs."""
        return NOTHING

    def discard_pass(self) -> None:
        """Take back the last pass: it was dropped, or ran only to keep the collectives of the ranks matched."""

    def after_pass(self, micro_batch: int, *, is_kept: bool, reports: bool) -> None:
        """See one micro-batch done, forward and backward. `reports` is False of a repeated or borrowed one."""

    def numbers(self, cut: MicroBatches, units: Sequence[float]) -> list[float]:
        """Give the numbers to be summed over ranks with the loss: equally many on each rank."""
        return []

    def receive(self, totals: Sequence[float], units: float, factor: Callable[[], float]) -> None:
        """Take those sums, the units of the batch, and the factor from what backward gave to the batch's gradient."""

    def for_lent(self, lent: Batch) -> "PassHook":
        """Return the hook for a micro-batch of another rank, run as the only one of its batch."""
        return self

    def finish(self) -> None:
        """See the whole batch done."""


def around(blocks: Iterable[AbstractContextManager[object]]) -> AbstractContextManager[Any]:
    """Enter these context managers in order, as one."""
    entered = [block for block in blocks if block is not NOTHING]
    return entered[0] if len(entered) == 1 else _nested(entered) if entered else NOTHING


@contextmanager
def _nested(blocks: Sequence[AbstractContextManager[object]]) -> Iterator[None]:
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block)
        yield
