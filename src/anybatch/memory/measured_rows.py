"""`MeasuredRows`: rows that grow from batch to batch, as far as what was measured says that they will fit."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from anybatch.batches import Batch, MicroBatches, Rows, Split, tensors
from anybatch.errors import MemoryLimitError
from anybatch.memory.tracing import Recorder, bytes_of
from anybatch.sizes import show_bytes


class MeasuredRows(Split):
    """One row in the first batch, at most twice as many in each that follows, and never more than `limit` bytes.

    For updates that cannot be predicted: while they run, every storage that an op returns is followed. What an op has beyond
    what stands, and the gradients, is linear in the rows and not negative, so `taken` bytes at `rows` rows are at most
    `taken * n / rows` at n. `standing()` gives weights, buffers and the optimizer's state, asked before each batch, since steps
    add to them.
    """

    def __init__(self, limit: int, standing: Callable[[], Iterable[Tensor]], most: int | None = None) -> None:
        self.limit = limit
        self.size = 1
        self.peak = 0
        """Bytes of the last batch, as measured."""
        self._standing = standing
        self._most = most
        self._batch_bytes = self._stands = 0
        self._per_row = 0.0

    def cut(self, batch: Batch) -> MicroBatches:
        """The micro-batches of `batch`, at the size that what was measured last allows."""
        self._batch_bytes = bytes_of(tensors(batch))
        standing = list(self._standing())
        gradients = bytes_of(one for one in standing if one.requires_grad)
        self._stands = bytes_of(standing) + self._batch_bytes + gradients
        least = self._stands + round(self._per_row)
        if least > self.limit:
            raise MemoryLimitError(
                f"a batch in micro-batches of a single row takes {show_bytes(least)} or more, and {show_bytes(self.limit)} are "
                "allowed. Allow more, use shorter rows, autocast=torch.bfloat16, or torch.utils.checkpoint inside the model."
            )
        if self._per_row:
            allowed = int((self.limit - self._stands) / self._per_row)
            self.size = min(2 * self.size, allowed, self._most or allowed)
        return Rows(self.size).cut(batch)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The block in which a batch runs: what it takes is measured."""
        recorder = Recorder((("parameters", tensor) for tensor in self._standing()), batch_bytes=self._batch_bytes)
        with recorder:
            yield
        self.peak = recorder.timeline.peak

    def learn(self, ran: MicroBatches, seconds: Sequence[float | None]) -> None:
        """Take note of what the micro-batches that were cut last have taken."""
        self.size = max(len(rows) for rows in ran.row_numbers)
        self._per_row = max(self.peak - self._stands, 1) / self.size

    def shrink(self, ran: MicroBatches) -> "MeasuredRows | None":
        """Half of what did not fit, and never more than that; None where that was one row."""
        largest = max(len(rows) for rows in ran.row_numbers)
        if largest == 1:
            return None
        self.size = self._most = largest // 2
        self._per_row = 0.0
        return self
