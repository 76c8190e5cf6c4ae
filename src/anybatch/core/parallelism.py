"""Ranks and the synchronisation of gradients over them; this module has one process, `parallel` has DDP and FSDP2."""

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
    """Processes that share one batch. In one process every method returns at once without a collective.

    Args:
        rank: Number of this process.
        size: Number of processes.
        group: Their process group; None for one process.
        device: Device of the tensors that collectives send.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @staticmethod
    def of(model: nn.Module) -> "Ranks":
        """Return the ranks of a model.

        Args:
            model: A module, plain, in `DistributedDataParallel` or sharded by `fully_shard`.

        Example:
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
        """All-gather a few `numbers`, in float64, and return them by rank. Waits for the device."""
        if self.size == 1:
            return [list(numbers)]
        own = torch.tensor(list(numbers), dtype=torch.float64, device=self.device)
        every = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(every, own, group=self.group)
        listed: list[list[float]] = torch.stack(every).tolist()
        return listed

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Sum each of `numbers` over ranks, in the order of the ranks, so that all get the same bits."""
        return [sum(column) for column in zip(*self.gather(numbers), strict=True)]

    def max(self, number: float) -> float:
        """Return the largest `number` of any rank."""
        return max(numbers[0] for numbers in self.gather([number]))

    def any(self, flag: bool) -> bool:
        """Return True on every rank if `flag` is True on one."""
        return self.max(float(flag)) > 0

    def gather_objects(self, value: T) -> list[T]:
        """All-gather the `value` of each rank, pickled, and return all by rank. Tensors must be on the CPU."""
        if self.size == 1:
            return [value]
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, value, group=self.group)
        return every

    def lend(self, make: Callable[[], T], lender: int) -> T:
        """Call `make` on the rank `lender` alone, and broadcast its result. Tensors must be on the CPU."""
        held = [make() if self.rank == lender else None]
        if self.size > 1:
            dist.broadcast_object_list(held, group_src=lender, group=self.group)
        return held[0]  # type: ignore[return-value]

    def all_rows(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """All-gather rows, `counts[r]` of them from rank r. Only `own` has a graph."""
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
    """True if every rank has to run as many passes as the others, because each pass is a collective."""
    own_reduction: str | None = None
    """Reason why torch's own reduction in the last backward pass cannot be used, for an error; None if it can."""
    one_collective: bool = False
    """True if all micro-batches run interleaved, and their gradient is reduced once at the end."""


class Sync:
    """Synchronisation of the passes of one batch: each runs inside `around_pass`, and `close` ends them.

    This base class is that of one process: it does nothing.
    """

    __slots__ = ()

    @property
    def factor(self) -> float:
        """Factor of every share: the number of ranks if torch averages over them, else 1."""
        return 1.0

    @property
    def reduces_in_last_backward(self) -> bool:
        """True if the last backward pass reduces gradients, so that it cannot be undone."""
        return False

    def around_pass(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Return the context of forward and backward of one pass.

        A schedule that interleaves all micro-batches enters it once, with `is_last=True`.
        """
        return _NO_CONTEXT

    def forward_only(self) -> AbstractContextManager[object]:
        """Return the context of a forward without a backward."""
        return _NO_CONTEXT

    def close(self, parameters: Sequence[nn.Parameter]) -> None:
        """Reduce what torch has not reduced; afterwards `.grad` is the whole batch's on every rank."""

    def reset(self) -> None:
        """Drop unfinished reductions after an error."""

    def give_zeros(self, plan: Any, tools: Any) -> None:
        """Set zero gradients for sharded parameters that only micro-batches without targets use."""


_NO_CONTEXT = nullcontext()


class Parallelism(Protocol):
    """Strategy that reduces one model's gradients over its ranks."""

    @property
    def ranks(self) -> Ranks: ...

    @property
    def needs_equal_passes(self) -> bool:
        """True if all ranks must run equally many passes, because each pass is a collective."""

    @property
    def overwrites(self) -> bool:
        """True if the reduction writes into the tensors that `.grad` held before."""

    def sync(self, needs: Needs, *, last_pass_fits: bool = True, leaves_out: bool = False) -> Sync:
        """Return the synchronisation of the next batch.

        `last_pass_fits`: the last pass is no larger than one that ran before. Otherwise gradients are reduced after backward
        if possible, so that an out-of-memory error in the last pass can be undone. `leaves_out`: a rank has micro-batches
        without units, which set zero gradients after all passes.
        """


class Alone(Sync):
    """One process: its own strategy, and its own synchronisation."""

    ranks = ONE_PROCESS
    needs_equal_passes = False
    overwrites = False

    def sync(self, needs: Needs, *, last_pass_fits: bool = True, leaves_out: bool = False) -> Sync:
        return self


ALONE = Alone()
