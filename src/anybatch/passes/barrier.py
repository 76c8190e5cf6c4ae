"""Ranks that go on together, or not at all."""

from dataclasses import dataclass

from anybatch.errors import ParallelError
from anybatch.parallel import Ranks
from anybatch.state import is_out_of_memory


@dataclass(slots=True)
class Barrier:
    """Where ranks tell each other, before what cannot be undone, that all of them got there.

    One that failed tells it instead of `hold`: then every rank raises. Out of memory on one rank is out of memory on all,
    so that all start again. Once it is over, a rank that fails does so alone. Nothing is told in one process, nor where
    passes themselves are collectives, as under `fully_shard`.
    """

    ranks: Ranks
    is_over: bool

    def hold(self, *, is_final: bool = False) -> None:
        """Wait for all ranks; an error where one has failed."""
        if not self.is_over:
            self.is_over = is_final
            self._hear(0)

    def fail(self, error: Exception) -> None:
        """Tell the others that this rank failed, before its error goes on its way."""
        if not self.is_over:
            self._hear(1 if is_out_of_memory(error) else 2, own=error)

    def _hear(self, state: int, own: Exception | None = None) -> None:
        states = [int(told) for (told,) in self.ranks.gather([float(state)])]
        if not any(states):
            return
        self.is_over = True
        if state == 2:
            return
        worst = max(states)
        rank = states.index(worst)
        if worst == 2:
            raise ParallelError(
                f"rank {rank} failed while it ran its micro-batches (its own error says why); no rank adds to its gradients."
            ) from own
        if own is None:
            raise MemoryError(f"on rank {rank}")
