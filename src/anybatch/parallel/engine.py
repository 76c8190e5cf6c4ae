"""When gradients are synchronised: in the last backward pass of an update, and in no other."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anybatch.errors import ParallelError
from anybatch.parallel.buckets import sum_by_hand
from anybatch.parallel.fsdp import gathered
from anybatch.parallel.ranks import ONE_PROCESS, Ranks
from anybatch.parallel.wrapping import fsdp_groups, wrapping_of


class Turn(Protocol):
    """One update's passes through a model: each is run inside `running`, and `close` ends them."""

    @property
    def is_synchronised(self) -> bool:
        """True where the last pass is synchronised while it runs, and so cannot be undone."""

    @property
    def factor(self) -> float:
        """What every share is multiplied by: the number of ranks where torch averages over them, else 1."""

    def running(self, *, is_last: bool) -> AbstractContextManager[object]:
        """The block around forward and backward of one pass."""

    def together(self) -> AbstractContextManager[object]:
        """The block around forward and backward of a batch whose micro-batches are all under way at once."""

    def close(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum over ranks what torch has not: after it `.grad` is the whole batch's, on every rank."""

    def forget(self) -> None:
        """Drop what an error left half-done."""


class Engine(Protocol):
    """How one model's gradients come together over its ranks."""

    @property
    def ranks(self) -> Ranks:
        """The ranks that it is spread over."""

    @property
    def is_even(self) -> bool:
        """True where all ranks must run the same number of passes."""

    @property
    def overwrites(self) -> bool:
        """True where synchronising writes into the tensors that `.grad` held before."""

    def turn(self, *, by_hand: str | None = None, is_proven: bool = True) -> Turn:
        """A new update. `by_hand` says why torch's own synchronisation cannot be used for it; None where it can.

        What is not proven to fit is rather synchronised after the last backward pass than in it.
        """


class Alone:
    """One process: nothing to synchronise, and no cost."""

    ranks = ONE_PROCESS
    is_even = False
    overwrites = False
    factor = 1.0
    is_synchronised = False
    _running = nullcontext()

    def turn(self, *, by_hand: str | None = None, is_proven: bool = True) -> "Alone":
        return self

    def running(self, *, is_last: bool) -> AbstractContextManager[object]:
        return self._running

    def together(self) -> AbstractContextManager[object]:
        return self._running

    def close(self, parameters: Sequence[nn.Parameter]) -> None:
        pass

    def forget(self) -> None:
        pass


ALONE = Alone()


@dataclass(frozen=True, slots=True)
class Replicated:
    """Modules in `DistributedDataParallel`."""

    modules: tuple[DistributedDataParallel, ...]
    ranks: Ranks
    is_even: bool = False

    @property
    def overwrites(self) -> bool:
        return any(module.gradient_as_bucket_view for module in self.modules)

    def turn(self, *, by_hand: str | None = None, is_proven: bool = True) -> Turn:
        if by_hand is None and any(_is_low(parameter) for module in self.modules for parameter in module.parameters()):
            by_hand = "the fp32 sums of bf16 and fp16 parameters"
        if by_hand is None and (is_proven or any(module._comm_hooks for module in self.modules)):
            return _Reduced(self.modules, self.ranks, float(self.ranks.size))
        for module in self.modules:
            if module._comm_hooks:
                hook = getattr(module._comm_hooks[0][0], "__name__", module._comm_hooks[0][0])
                raise ParallelError(
                    f"{_name(module)} has the comm hook {hook}, but {by_hand} cannot go through DDP's reducer, which calls it. "
                    "Leave the hook out, or use fp32 parameters, on_nonfinite other than 'drop', an objective that is not "
                    "coupled, and batch_norm other than 'exact'."
                )
            # once here, as DDP does in the first forward: ranks may run different numbers of forwards at a time
            if module.will_sync_module_buffers():
                module._sync_buffers()
            module.require_forward_param_sync = False
        return _ByHand(self.modules, self.ranks)


def _name(module: DistributedDataParallel) -> str:
    return f"DistributedDataParallel({type(module.module).__name__})"


def _is_low(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16)


@contextmanager
def _unsynchronised(modules: Sequence[DistributedDataParallel]) -> Iterator[None]:
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.no_sync())
        yield


@contextmanager
def _all_at_once(modules: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Unsynchronised forwards that are under way at the same time, each of which puts back what it found of the one before."""
    outside = DistributedDataParallel._active_ddp_module
    try:
        with _unsynchronised(modules):
            yield
    finally:
        DistributedDataParallel._active_ddp_module = outside  # else the class holds the model for ever, and its group


@dataclass(frozen=True, slots=True)
class _ByHand:
    """No pass is synchronised; gradients are summed at the close."""

    modules: tuple[DistributedDataParallel, ...]
    ranks: Ranks
    factor: float = 1.0
    is_synchronised: bool = False

    def running(self, *, is_last: bool) -> AbstractContextManager[object]:
        return _unsynchronised(self.modules)

    def together(self) -> AbstractContextManager[object]:
        return _all_at_once(self.modules)

    def close(self, parameters: Sequence[nn.Parameter]) -> None:
        sum_by_hand(self.ranks, parameters)
        for module in self.modules:
            module.require_forward_param_sync = True  # as after a synchronised pass

    def forget(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Reduced:
    """DDP's reducer averages in the last backward pass, while it runs; the others run in `no_sync`, forward and backward."""

    modules: tuple[DistributedDataParallel, ...]
    ranks: Ranks
    factor: float
    is_synchronised: bool = True

    def running(self, *, is_last: bool) -> AbstractContextManager[object]:
        return self._synchronised() if is_last else _unsynchronised(self.modules)

    def together(self) -> AbstractContextManager[object]:
        return _all_at_once(self.modules)

    @contextmanager
    def _synchronised(self) -> Iterator[None]:
        called: set[nn.Module] = set()
        hooks = [module.register_forward_pre_hook(lambda module, _: called.add(module)) for module in self.modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for module in self.modules:
            if module in called:
                _check_reduced(module)
            elif any(parameter.grad is not None for parameter in module.parameters()):
                raise ParallelError(
                    f"the objective did not call {_name(module)} itself, so its gradients were not summed over ranks. Call "
                    "the wrapped model, as model(...), not model.module(...) or a method of it."
                )

    def close(self, parameters: Sequence[nn.Parameter]) -> None:
        inside = {parameter for module in self.modules for parameter in module.parameters()}
        sum_by_hand(self.ranks, [p for p in parameters if p not in inside], divisor=self.factor)

    def forget(self) -> None:
        pass


def _check_reduced(module: DistributedDataParallel) -> None:
    """DDP finds out in its next forward only that a reduction did not end; the gradients of this update would be wrong."""
    try:
        module.reducer._rebuild_buckets()
    except RuntimeError as error:
        if "finished reduction" not in str(error):
            raise
        raise ParallelError(
            f"some parameters of {_name(module)} had no gradient in the last micro-batch of this rank, and their sum over "
            "ranks never ran. Wrap the model with find_unused_parameters=True."
        ) from error


@dataclass(frozen=True, slots=True)
class Sharded:
    """Modules sharded by `fully_shard`."""

    roots: tuple[Any, ...]
    ranks: Ranks
    reshard: bool
    """Parameters are freed after each backward pass, and gathered again for the next; else they stay until the last."""
    is_even: bool = True
    overwrites: bool = False

    def turn(self, *, by_hand: str | None = None, is_proven: bool = True) -> Turn:
        return _Scattered(self.roots, self.ranks, self.reshard, float(self.ranks.size))


@dataclass(frozen=True, slots=True)
class _Scattered:
    """FSDP2 averages over ranks in the last backward pass; before it each rank adds up whole gradients of its own."""

    roots: tuple[Any, ...]
    ranks: Ranks
    reshard: bool
    factor: float
    is_synchronised: bool = True

    @contextmanager
    def running(self, *, is_last: bool) -> Iterator[None]:
        before = [(group, group.reshard_after_backward) for root in self.roots for group in fsdp_groups(root)]
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
            for group, reshard in before:
                group.reshard_after_backward = reshard

    def together(self) -> AbstractContextManager[object]:
        return gathered(self.roots)

    def close(self, parameters: Sequence[nn.Parameter]) -> None:
        inside = {parameter for root in self.roots for parameter in root.parameters()}
        sum_by_hand(self.ranks, [p for p in parameters if p not in inside], divisor=self.factor)

    def forget(self) -> None:
        for root in self.roots:
            root.reset_iter_state()
            for group in fsdp_groups(root):
                for parameter in group.fsdp_params:
                    parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):
                        parameter._unsharded_param.grad = None


def engine_for(model: nn.Module, *, reshard: bool) -> Engine:
    """What synchronises the gradients of `model`."""
    ranks = Ranks.of(model)
    wrapping = wrapping_of(model)
    if wrapping.sharded:
        return Sharded(wrapping.sharded, ranks, reshard)
    return Replicated(wrapping.replicated, ranks) if wrapping.replicated else ALONE
