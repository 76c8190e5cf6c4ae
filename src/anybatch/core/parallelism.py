"""How the passes of one batch are synchronised over ranks; in one process, not at all."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes over which one batch is spread. In one process every method returns at once and sends nothing."""

    rank: int = 0
    size: int = 1
    group: Any = None
    """Their process group; None for one process."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Device that collectives take their numbers on."""

    @staticmethod
    def of(model: nn.Module) -> "Ranks":
        """Find the ranks that a model wrapped in `DistributedDataParallel` or sharded by `fully_shard` is spread over.

        >>> Ranks.of(nn.Linear(2, 2)).size
        1
        """
        from anybatch.core.plugins import group_of

        group = group_of(model)
        if group is None or dist.get_world_size(group) == 1:
            return ONE_PROCESS
        first = next(model.parameters(), None)
        device = torch.device("cpu") if first is None or dist.get_backend(group) == "gloo" else first.device
        return Ranks(dist.get_rank(group), dist.get_world_size(group), group, device)

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Gather a few numbers of every rank, by rank: one small collective in float64. Waits for the device."""
        if self.size == 1:
            return [list(numbers)]
        own = torch.tensor(list(numbers), dtype=torch.float64, device=self.device)
        every = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(every, own, group=self.group)
        listed: list[list[float]] = torch.stack(every).tolist()
        return listed

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Sum each number over the ranks, always in the order of the ranks."""
        return [sum(column) for column in zip(*self.gather(numbers), strict=True)]

    def max(self, number: float) -> float:
        return max(numbers[0] for numbers in self.gather([number]))

    def any(self, flag: bool) -> bool:
        """Return True everywhere if it is True on one rank."""
        return self.max(float(flag)) > 0

    def gather_objects(self, value: T) -> list[T]:
        """Gather every rank's object, by rank, pickled. Put tensors on the CPU first."""
        if self.size == 1:
            return [value]
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, value, group=self.group)
        return every

    def lend(self, make: Callable[[], T], lender: int) -> T:
        """Call `make` on the rank `lender` alone, and broadcast what it returns. Tensors must be on the CPU."""
        held = [make() if self.rank == lender else None]
        if self.size > 1:
            dist.broadcast_object_list(held, group_src=lender, group=self.group)
        return held[0]  # type: ignore[return-value]

    def all_rows(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """Gather every rank's rows, by rank, where rank r has `counts[r]`; `own` keeps its graph, others' rows have none."""
        if self.size == 1:
            return own
        is_flag = own.dtype is torch.bool
        sent = own.detach().to(self.device)
        padded = sent.new_zeros((max(counts), *own.shape[1:]), dtype=torch.uint8 if is_flag else None)
        padded[: len(own)] = sent
        every = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(every, padded, group=self.group)
        parts = [part[:count].to(own.device, own.dtype) for part, count in zip(every, counts, strict=True)]
        parts[self.rank] = own
        return torch.cat(parts)


ONE_PROCESS = Ranks()


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Requirements of a schedule on the synchronisation."""

    needs_equal_passes: bool = False
    """Every rank has to run as many passes as the others, because each pass is a collective."""
    own_reduction: str | None = None
    """Why torch's own reduction in the last backward pass cannot be used, in words for an error; None where it can."""
    one_collective: bool = False
    """All micro-batches are under way at once, and their gradient is reduced once, when all of it is there."""


class Sync:
    """How the passes of one batch are synchronised: each runs inside `around_pass`, and `close` ends them.

    The methods are those of one process: nothing is synchronised.
    """

    __slots__ = ()

    @property
    def factor(self) -> float:
        """Factor of every share: the number of ranks where torch averages over them, else 1."""
        return 1.0

    @property
    def reduces_in_last_backward(self) -> bool:
        """True where the last pass is synchronised while it runs, and so cannot be undone."""
        return False

    def around_pass(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Context of forward and backward of one pass.

        A schedule whose micro-batches are all under way at once enters it once, with `is_last=True`.
        """
        return _NO_CONTEXT

    def forward_only(self) -> AbstractContextManager[object]:
        """Context of a forward that no backward follows."""
        return _NO_CONTEXT

    def close(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum over ranks what torch has not: after it `.grad` is the whole batch's, on every rank."""

    def reset(self) -> None:
        """Drop what an error left half-done."""

    def give_zeros(self, plan: Any, tools: Any) -> None:
        """Give zero gradients to sharded parameters that only micro-batches without targets use."""


_NO_CONTEXT = nullcontext()


class Parallelism(Protocol):
    """How one model's gradients come together over its ranks."""

    @property
    def ranks(self) -> Ranks: ...

    @property
    def needs_equal_passes(self) -> bool:
        """True where all ranks must run the same number of passes when passes run one by one."""

    @property
    def overwrites(self) -> bool:
        """True where synchronising writes into the tensors that `.grad` held before."""

    def sync(self, needs: Needs, *, last_pass_fits: bool = True, leaves_out: bool = False) -> Sync:
        """Choose how the passes of the next batch are synchronised.

        `last_pass_fits` says that the last pass is no larger than one that ran before. A larger last pass is synchronised
        after backward where that can be done, because running out of memory in it can then be undone. `leaves_out` says that a
        rank has micro-batches without units, whose parameters get zeros once all passes ran.
        """


class Alone(Sync):
    """One process, as an engine and as its synchronisation."""

    ranks = ONE_PROCESS
    needs_equal_passes = False
    overwrites = False

    def sync(self, needs: Needs, *, last_pass_fits: bool = True, leaves_out: bool = False) -> Sync:
        return self


ALONE = Alone()
