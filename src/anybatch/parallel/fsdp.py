"""Models sharded by `fully_shard`: each pass gathers parameters, or one batch does; gradients are reduced once, by FSDP2."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from anybatch.core import Needs, Ranks, Sync
from anybatch.parallel.buckets import sum_in_buckets
from anybatch.parallel.torch_private_fsdp import (
    forget_gathered_gradients,
    forwards_as_repeats,
    gather_for_batch,
    gathered_parameters,
    reduce_gathered,
    resharding_put_back,
)


@dataclass(frozen=True, slots=True)
class Sharded:
    """The engine of modules sharded by `fully_shard`."""

    roots: tuple[Any, ...]
    ranks: Ranks
    reshard: bool
    """Parameters are freed after each backward pass, and gathered again for the next; else they stay until the last."""
    is_even: bool = True
    overwrites: bool = False

    def sync(self, needs: Needs, *, is_proven: bool = True, leaves_out: bool = False) -> Sync:
        if needs.one_collective:
            return Gathered(self.roots, self.ranks)
        return Scattered(self.roots, self.ranks, self.reshard)


@dataclass(frozen=True, slots=True)
class Scattered(Sync):
    """FSDP2 averages over ranks in the last backward pass; before it each rank adds up whole gradients of its own."""

    roots: tuple[Any, ...]
    ranks: Ranks
    reshard: bool
    is_shared: bool = True

    @property
    def factor(self) -> float:
        return float(self.ranks.size)

    @contextmanager
    def passing(self, *, is_last: bool) -> Iterator[None]:
        with resharding_put_back(self.roots):
            for root in self.roots:
                root.set_requires_gradient_sync(is_last)
                root.set_is_last_backward(is_last)
                if not is_last and not self.reshard:
                    root.set_reshard_after_backward(False)
            try:
                yield
            finally:
                for root in self.roots:
                    root.set_requires_gradient_sync(True)
                    root.set_is_last_backward(True)

    def looking(self) -> AbstractContextManager[object]:
        return _resharded(self.roots)

    def close(self, parameters: Sequence[nn.Parameter]) -> None:
        _sum_outside(self.roots, self.ranks, parameters)

    def forget(self) -> None:
        _forget(self.roots)

    def give_zeros(self, plan: Any, tools: Any) -> None:
        from anybatch.parallel.sharded_zeros import give_zeros

        give_zeros(plan, tools)


@dataclass(frozen=True, slots=True)
class Gathered(Sync):
    """Whole parameters lie on every rank from the first forward of a batch to its end, where FSDP2 averages and frees them.

    Forward and backward send nothing in between, so ranks may run as many as they have. Whole gradients add up in the dtype
    that they are reduced in.
    """

    roots: tuple[Any, ...]
    ranks: Ranks
    is_shared: bool = True

    @property
    def factor(self) -> float:
        return float(self.ranks.size)

    @contextmanager
    def passing(self, *, is_last: bool) -> Iterator[None]:
        """The block around all forwards and backwards of the batch. After an error in it `forget` frees the parameters."""
        for root in self.roots:
            root.set_requires_gradient_sync(True)
            root.set_is_last_backward(True)
            gather_for_batch(root)
        whole = [(parameter, parameter.grad_dtype, dtype) for parameter, dtype in gathered_parameters(self.roots)]
        try:
            for parameter, _, dtype in whole:
                if dtype is not None:
                    parameter.grad_dtype = dtype
            with forwards_as_repeats(self.roots):
                yield
            for root in self.roots:
                reduce_gathered(root)
        finally:
            for parameter, before, _ in whole:
                parameter.grad = None
                parameter.grad_dtype = before

    def looking(self) -> AbstractContextManager[object]:
        return _resharded(self.roots)

    def close(self, parameters: Sequence[nn.Parameter]) -> None:
        _sum_outside(self.roots, self.ranks, parameters)

    def forget(self) -> None:
        _forget(self.roots)


def _sum_outside(roots: Sequence[Any], ranks: Ranks, parameters: Sequence[nn.Parameter]) -> None:
    """Average over ranks what `fully_shard` knows nothing of, such as a criterion's parameters."""
    inside = {parameter for root in roots for parameter in root.parameters()}
    sum_in_buckets(ranks, [p for p in parameters if p not in inside], divisor=float(ranks.size))


@contextmanager
def _resharded(roots: Sequence[Any]) -> Iterator[None]:
    """The block after which nothing is gathered any more: else the next forward would find the weights of before the step."""
    try:
        yield
    finally:
        reshard_all(roots)


def reshard_all(roots: Sequence[Any]) -> None:
    """Free what a forward without a backward has gathered."""
    for root in roots:
        for module in root.modules():
            if hasattr(module, "reshard"):
                module.reshard()


def _forget(roots: Sequence[Any]) -> None:
    """Free gathered parameters, and drop gradients that were added up and not reduced."""
    for root in roots:
        root.reset_iter_state()
    forget_gathered_gradients(roots)
