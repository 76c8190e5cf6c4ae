"""Ranks that go on together, or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from anybatch.core.out_of_memory import is_out_of_memory
from anybatch.core.ranks import Ranks
from anybatch.errors import MemoryLimitError, ParallelError, first_line


@dataclass(slots=True)
class Barrier:
    """Where ranks tell each other, before what cannot be undone, that all of them got there.

    One that failed tells it instead of `hold`: then every rank raises. Out of memory on one rank is out of memory on all,
    so that all start again. Once it is over, a rank that fails does so alone, and memory that ran out is an error: the others
    are inside a collective, and would take a new one of this rank's for their own. Nothing is told in one process, nor where
    passes themselves are collectives, as under `fully_shard`.
    """

    ranks: Ranks
    is_over: bool
    is_known: bool = False
    """Every rank has heard that one failed."""

    def hold(self, *, is_final: bool = False) -> None:
        """Wait for all ranks; an error where one has failed."""
        if not self.is_over:
            self.is_over = is_final
            self._hear(0)

    def fail(self, error: Exception) -> None:
        """Tell the others that this rank failed, before its error goes on its way."""
        if not self.is_over:
            self._hear(1 if is_out_of_memory(error) else 2, own=error)
        elif not self.is_known:
            with memory_is_final(self.ranks):
                raise error

    def _hear(self, state: int, own: Exception | None = None) -> None:
        states = [int(told) for (told,) in self.ranks.gather([float(state)])]
        if not any(states):
            return
        self.is_over = self.is_known = True
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


@contextmanager
def memory_is_final(ranks: Ranks) -> Iterator[None]:
    """The block in which memory that runs out on one of several ranks is an error, because the others cannot be told of it."""
    try:
        yield
    except Exception as error:
        if ranks.size == 1 or not is_out_of_memory(error):
            raise
        raise MemoryLimitError(
            f"memory ran out on rank {ranks.rank} ({first_line(error)}) where the {ranks.size} ranks could no longer agree to "
            "start again. No rank adds to its gradients; let this process end, and the others end with it. Use a smaller "
            "micro-batch, or start all ranks again from the last checkpoint."
        ) from error
