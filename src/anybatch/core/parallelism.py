"""How the passes of one batch are synchronised over ranks: the protocols, and the engine of one process."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from anybatch.core.ranks import ONE_PROCESS, Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a schedule needs of the synchronisation."""

    even_passes: bool = False
    """Every rank has to run as many passes as the others, because each pass is a collective."""
    own_reduction: str | None = None
    """Why torch's own reduction in the last backward pass cannot be used, in words for an error; None where it can."""
    one_collective: bool = False
    """All micro-batches are under way at once, and their gradient is reduced once, when all of it is there."""


class Sync(Protocol):
    """How the passes of one batch are synchronised: each runs inside `passing`, and `close` ends them."""

    @property
    def factor(self) -> float:
        """What every share is multiplied by: the number of ranks where torch averages over them, else 1."""

    @property
    def is_shared(self) -> bool:
        """True where the last pass is synchronised while it runs, and so cannot be undone."""

    def passing(self, *, is_last: bool) -> AbstractContextManager[object]:
        """The block around forward and backward of one pass.

        A schedule whose micro-batches are all under way at once enters it once, with `is_last=True`.
        """

    def looking(self) -> AbstractContextManager[object]:
        """The block around a forward that no backward follows."""

    def close(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum over ranks what torch has not: after it `.grad` is the whole batch's, on every rank."""

    def forget(self) -> None:
        """Drop what an error left half-done."""

    def give_zeros(self, plan: Any, tools: Any) -> None:
        """Give zero gradients to sharded parameters that only micro-batches without targets use."""
        return


class Engine(Protocol):
    """How one model's gradients come together over its ranks."""

    @property
    def ranks(self) -> Ranks:
        """The ranks that the model is spread over."""

    @property
    def is_even(self) -> bool:
        """True where all ranks must run the same number of passes when passes run one by one."""

    @property
    def overwrites(self) -> bool:
        """True where synchronising writes into the tensors that `.grad` held before."""

    def sync(self, needs: Needs, *, is_proven: bool = True, leaves_out: bool = False) -> Sync:
        """How the passes of the next batch are synchronised.

        `is_proven` says that the last pass is no larger than one that ran before. A last pass that is larger is synchronised
        after backward where that can be done, because running out of memory in it can then be undone. `leaves_out` says that a
        rank has micro-batches without units, whose parameters get zeros once all passes ran.
        """


class Alone(Sync):
    """One process, as an engine and as its synchronisation: it synchronises nothing, and costs nothing."""

    ranks = ONE_PROCESS
    is_even = False
    overwrites = False
    factor = 1.0
    is_shared = False
    _passing = nullcontext()

    def sync(self, needs: Needs, *, is_proven: bool = True, leaves_out: bool = False) -> "Alone":
        return self

    def passing(self, *, is_last: bool) -> AbstractContextManager[object]:
        return self._passing

    def looking(self) -> AbstractContextManager[object]:
        return self._passing

    def close(self, parameters: Sequence[nn.Parameter]) -> None:
        pass

    def forget(self) -> None:
        pass


ALONE = Alone()
