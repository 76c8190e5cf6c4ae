"""Models sharded by `fully_shard`: parameters gathered for each pass or for one batch; gradients reduced once, by FSDP2."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from anybatch.core import Batch, BatchPlan, Needs, Ranks, Sync, Tools, is_sharded, leaves_of, loss_and_metrics, move
from anybatch.parallel.ddp import average_outside
from anybatch.parallel.torch_private_fsdp import (
    forget_gathered_gradients,
    forwards_as_repeats,
    gather_for_batch,
    gathered_parameters,
    reduce_gathered,
    restoring_reshard,
    whole_parameters,
)


@dataclass(frozen=True, slots=True)
class Sharded:
    """Parallelism of modules sharded by `fully_shard`."""

    roots: tuple[Any, ...]
    ranks: Ranks
    reshard: bool
    """Free parameters after each backward pass and gather them again for the next; else they stay until the last."""
    needs_equal_passes: bool = True
    overwrites: bool = False

    def sync(self, needs: Needs, *, last_pass_fits: bool = True, leaves_out: bool = False) -> Sync:
        if needs.one_collective:
            return Gathered(self.roots, self.ranks)
        return Scattered(self.roots, self.ranks, self.reshard)


@dataclass(frozen=True, slots=True)
class _FSDPSync(Sync):
    """FSDP2 averages over ranks, in the last backward pass or after it."""

    roots: tuple[Any, ...]
    ranks: Ranks
    reduces_in_last_backward: ClassVar[bool] = True

    @property
    def factor(self) -> float:
        return float(self.ranks.size)

    @contextmanager
    def forward_only(self) -> Iterator[None]:
        try:
            yield
        finally:  # else the next forward would use the weights from before the step
            reshard_all(self.roots)

    def close(self, parameters: Sequence[nn.Parameter]) -> None:
        average_outside(self.roots, self.ranks, parameters)

    def reset(self) -> None:
        """Free gathered parameters, and drop gradients that were accumulated and not reduced."""
        for root in self.roots:
            root.reset_iter_state()
        forget_gathered_gradients(self.roots)


@dataclass(frozen=True, slots=True)
class Scattered(_FSDPSync):
    """FSDP2 averages over ranks in the last backward pass; before it each rank accumulates unsharded gradients."""

    reshard: bool

    @contextmanager
    def around_pass(self, *, is_last: bool) -> Iterator[None]:
        with restoring_reshard(self.roots):
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

    def give_zeros(self, plan: BatchPlan, tools: Tools) -> None:
        """Give zeros, as the whole batch would, to parameters that only micro-batches without targets use.

        A forward gathers the units that it runs through on all ranks at once, and rows of different ranks may run through
        different units. So every rank runs every micro-batch that was left out on any rank.
        """
        bare = [p for p in tools.gradients.parameters if is_sharded(p) and p.grad is None]
        if not plan.num_left_out or not bare:  # the same on all ranks
            return
        for lender, (count,) in enumerate(tools.ranks.gather([len(plan.left_out)])):
            for number in range(int(count)):
                lent = tools.ranks.lend(lambda: move(plan.cut[plan.left_out[number]], torch.device("cpu")), lender)  # noqa: B023
                used = _used(lent, tools)
                for parameter in bare:
                    if parameter in used:
                        parameter.grad = torch.zeros_like(parameter)
        held = [parameter.grad for parameter in tools.gradients.parameters]
        self.reset()  # drops the state of forwards that no backward follows, and since torch 2.15 gradients too
        for parameter, gradient in zip(tools.gradients.parameters, held, strict=True):
            parameter.grad = gradient


def _used(lent: Batch, tools: Tools) -> set[nn.Parameter]:
    """Find the sharded parameters in the graph of the loss of this micro-batch."""
    forward = replace(tools.quiet_forward(), hooks=tuple(hook.for_lent(lent) for hook in tools.hooks))
    for hook in tools.hooks:
        hook.before_pass()
    with tools.sync.forward_only():
        loss, _ = loss_and_metrics(forward(lent))
    for hook in tools.hooks:
        hook.discard_pass()
    leaves = {id(leaf) for leaf in leaves_of([loss])}
    return {part for part, whole in whole_parameters(tools.forward.model) if id(whole) in leaves}


@dataclass(frozen=True, slots=True)
class Gathered(_FSDPSync):
    """Unsharded parameters stay on every rank from the first forward of a batch to its end, where FSDP2 averages and frees.

    There is no collective in between, so that ranks may run different numbers of passes. Unsharded gradients accumulate in the
    dtype that they are reduced in.
    """

    @contextmanager
    def around_pass(self, *, is_last: bool) -> Iterator[None]:
        """Surround all forwards and backwards of the batch. After an error, `reset` frees the parameters."""
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


def reshard_all(roots: Sequence[Any]) -> None:
    """Free the parameters that a forward without a backward has gathered."""
    for root in roots:
        for module in root.modules():
            if hasattr(module, "reshard"):
                module.reshard()
