"""`PassHook`: the way in which BatchNorm statistics, row-keyed dropout, noise and timing take part in a batch."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from anybatch.core.batch import Batch
from anybatch.core.splits import MicroBatches

NOTHING: AbstractContextManager[object] = nullcontext()


class PassHook:
    """Callbacks during the passes of one batch. Every method does nothing by default.

    A plain batch has no hooks.
    """

    needs_all_rows = False
    """True if micro-batches without targets have to run too."""

    def around_batch(self) -> AbstractContextManager[object]:
        """Surround all passes of the batch."""
        return NOTHING

    def around_counted(self) -> AbstractContextManager[object]:
        """Surround one pass per micro-batch: for a coupled loss, the first of its two."""
        return NOTHING

    def before_pass(self) -> None:
        """Prepare for the next micro-batch."""

    def around_forward(self, micro_batch: int) -> AbstractContextManager[object]:
        """Surround the forward of one micro-batch."""
        return NOTHING

    def in_lockstep(self, current: Callable[[], int]) -> AbstractContextManager[object]:
        """Surround forwards that run interleaved; `current()` is the number of the micro-batch that runs now."""
        return NOTHING

    def discard_pass(self) -> None:
        """Undo the last pass: it was dropped, or ran only to keep the collectives of the ranks matched."""

    def after_pass(self, micro_batch: int, *, is_kept: bool, reports: bool) -> None:
        """Called after forward and backward of a micro-batch. `reports` is False for a repeated or borrowed one."""

    def numbers(self, cut: MicroBatches, units: Sequence[float]) -> list[float]:
        """Return numbers to be summed over ranks together with the loss: equally many on each rank."""
        return []

    def receive(self, totals: Sequence[float], units: float, factor: Callable[[], float]) -> None:
        """Called with those sums, the units of the batch, and the factor from summed to final gradient."""

    def for_lent(self, lent: Batch) -> "PassHook":
        """Return the hook for a micro-batch of another rank, run as the only one of its batch."""
        return self

    def finish(self) -> None:
        """Called after the whole batch."""


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
