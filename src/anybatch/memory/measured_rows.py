"""`MeasuredRows`: rows that grow from batch to batch, as far as what was measured says that they will fit."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from anybatch.batches import Batch, MicroBatches, Rows, tensors
from anybatch.errors import MemoryLimitError
from anybatch.memory.tracing import Recorder, bytes_of
from anybatch.sizes import show_bytes


class MeasuredRows:
    """One row in the first batch, at most twice as many in each that follows, and never more than `limit` bytes.

    For updates that cannot be predicted: while they run, every storage that an op returns is followed. Bytes after each op are
    linear in the rows, and no op has less than what stands, so the peak of more rows is at most `standing + (peak - standing)
    * rows / measured rows`. `standing()` gives weights, buffers and the optimizer's state.
    """

    def __init__(self, limit: int, standing: Callable[[], Iterable[Tensor]], most: int | None = None) -> None:
        self.limit = limit
        self.size = 1
        self.peak = 0
        """Bytes of the last batch, as measured."""
        self._standing = standing
        self._most = most
        self._batch_bytes = 0

    def cut(self, batch: Batch) -> MicroBatches:
        """The micro-batches of `batch`, at the size of the moment."""
        if self.size == 1 and self.peak > self.limit:
            raise MemoryLimitError(
                f"a batch in micro-batches of a single row took {show_bytes(self.peak)}, and {show_bytes(self.limit)} are "
                "allowed. Allow more, use shorter rows, autocast=torch.bfloat16, or torch.utils.checkpoint inside the model."
            )
        self._batch_bytes = bytes_of(tensors(batch))
        return Rows(self.size).cut(batch)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The block in which a batch runs: what it takes is measured."""
        recorder = Recorder((("parameters", tensor) for tensor in self._standing()), batch_bytes=self._batch_bytes)
        with recorder:
            yield
        self.peak = recorder.timeline.peak

    def learn(self, ran: MicroBatches, seconds: Sequence[float | None]) -> None:
        """Take note of what the micro-batches that were cut last have taken, and choose the next size by it."""
        if len(ran) == 1 and self.peak <= self.limit:
            return
        standing = bytes_of(self._standing()) + self._batch_bytes
        most = int(self.size * max(self.limit - standing, 0) / max(self.peak - standing, 1))
        self.size = max(min(2 * self.size, most, self._most or most), 1)

    def shrink(self, ran: MicroBatches) -> "MeasuredRows | None":
        """Half of what did not fit, and never more than that; None where that was one row."""
        largest = max(len(rows) for rows in ran.row_numbers)
        if largest == 1:
            return None
        self.size = self._most = largest // 2
        return self
