"""Models in `DistributedDataParallel`: gradients reduced by DDP in the last backward pass, or summed in buckets after it."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anybatch.core import Needs, Ranks, Sync, around, is_low
from anybatch.errors import ParallelError
from anybatch.parallel.torch_private_ddp import (
    comm_hooks,
    end_reduction,
    forget_used_parameters,
    restoring_active_ddp,
    sync_buffers_again,
    sync_buffers_once,
)

BUCKET_BYTES = 25 * 2**20
"""Size of the buckets of DDP's own reducer."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """Parallelism of modules in `DistributedDataParallel`."""

    modules: tuple[DistributedDataParallel, ...]
    ranks: Ranks
    needs_equal_passes: bool = False

    @property
    def overwrites(self) -> bool:
        return any(module.gradient_as_bucket_view for module in self.modules)

    def sync(self, needs: Needs, *, last_pass_fits: bool = True, leaves_out: bool = False) -> Sync:
        if not all(module.require_backward_grad_sync for module in self.modules):
            raise ParallelError(
                "this update runs inside a no_sync() of DistributedDataParallel (Accelerate's no_sync or accumulate open one), "
                "so that gradients would never meet. Call it outside: an update synchronises once by itself."
            )
        parameters = (parameter for module in self.modules for parameter in module.parameters())
        why = needs.own_reduction
        if why is None and any(is_low(parameter) for parameter in parameters if parameter.requires_grad):
            why = "the fp32 sums of bf16 and fp16 parameters"  # DDP sums in the dtype of the parameters
        is_done = last_pass_fits and not (leaves_out and any(module.find_unused_parameters for module in self.modules))
        is_reduced = why is None and (is_done or any(comm_hooks(module) for module in self.modules))
        for module in self.modules:
            if not is_reduced:
                _check_hooks(module, why)
            # before all passes, because the first pass of one rank may be the last of another, which waits there for the others
            sync_buffers_once(module)
        return Reduced(self.modules, self.ranks) if is_reduced else Bucketed(self.modules, self.ranks)


@dataclass(frozen=True, slots=True)
class _DDPSync(Sync):
    modules: tuple[DistributedDataParallel, ...]
    ranks: Ranks

    def forward_only(self) -> AbstractContextManager[object]:
        return around(module.no_sync() for module in self.modules)

    def reset(self) -> None:
        """Do what DDP does at the end of a synchronised pass, for passes that were not synchronised or failed.

        Buffers are broadcast again on every rank, because a rank that failed in its first forward will broadcast its own again.
        Parameters that these passes used do not count as used in the next.
        """
        for module in self.modules:
            sync_buffers_again(module)
            forget_used_parameters(module)


@dataclass(frozen=True, slots=True)
class Reduced(_DDPSync):
    """DDP's reducer averages in the last backward pass, while it runs; the other passes run in `no_sync`."""

    reduces_in_last_backward: bool = True

    @property
    def factor(self) -> float:
        return float(self.ranks.size)

    @contextmanager
    def around_pass(self, *, is_last: bool) -> Iterator[None]:
        if not is_last:
            with self.forward_only():
                yield
            return
        called: set[nn.Module] = set()
        hooks = [module.register_forward_pre_hook(lambda module, _: called.add(module)) for module in self.modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for module in self.modules:
            _check_reduced(module, is_called=module in called)

    def close(self, parameters: Sequence[nn.Parameter]) -> None:
        average_outside(self.modules, self.ranks, parameters)


@dataclass(frozen=True, slots=True)
class Bucketed(_DDPSync):
    """DDP synchronises no pass; gradients are summed over ranks in buckets, at the close."""

    factor: float = 1.0
    reduces_in_last_backward: bool = False

    @contextmanager
    def around_pass(self, *, is_last: bool) -> Iterator[None]:
        with restoring_active_ddp(), around(module.no_sync() for module in self.modules):
            yield

    def forward_only(self) -> AbstractContextManager[object]:
        return self.around_pass(is_last=False)

    def close(self, parameters: Sequence[nn.Parameter]) -> None:
        sum_in_buckets(self.ranks, parameters)
        self.reset()


def average_outside(modules: Sequence[nn.Module], ranks: Ranks, parameters: Sequence[nn.Parameter]) -> None:
    """Average over ranks the gradients of parameters outside `modules`, such as a criterion's."""
    inside = {parameter for module in modules for parameter in module.parameters()}
    sum_in_buckets(ranks, [p for p in parameters if p not in inside], divisor=float(ranks.size))


@torch.no_grad()
def sum_in_buckets(ranks: Ranks, parameters: Sequence[nn.Parameter], *, divisor: float = 1.0) -> None:
    """Set `.grad` to the sum of every rank's `.grad` / `divisor`, on every rank; None on all ranks stays None.

    One all-reduce per bucket. Each bucket ends with a flag per parameter: whether any rank has a gradient. Sparse gradients
    become dense.
    """
    if ranks.size == 1:
        return
    for dtype, bucket in _buckets(parameters):
        sizes = [parameter.numel() for parameter in bucket]
        flat = torch.zeros(sum(sizes) + len(bucket), dtype=dtype, device=bucket[0].device)
        *pieces, flags = flat.split([*sizes, len(bucket)])
        for number, (parameter, piece) in enumerate(zip(bucket, pieces, strict=True)):
            if parameter.grad is not None:
                piece.view(parameter.shape).copy_(parameter.grad.to_dense())
                flags[number] = 1
        dist.all_reduce(flat, group=ranks.group)
        if divisor != 1.0:
            flat.div_(divisor)
        for parameter, piece, flag in zip(bucket, pieces, flags.tolist(), strict=True):
            total = piece.view(parameter.shape)
            if flag <= 0:
                continue
            if parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = total.clone()
            else:
                parameter.grad.copy_(total)


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[tuple[torch.dtype, list[nn.Parameter]]]:
    """Yield parameters of one dtype and device, in order, up to the size of a bucket; the same on every rank."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in parameters:
        kind = (parameter.grad_dtype or parameter.dtype, parameter.device)
        num_bytes = parameter.numel() * kind[0].itemsize
        if kind in open_buckets and filled[kind] + num_bytes > BUCKET_BYTES:
            yield kind[0], open_buckets.pop(kind)
        if kind not in open_buckets:
            open_buckets[kind], filled[kind] = [], 0
        open_buckets[kind].append(parameter)
        filled[kind] += num_bytes
    yield from ((dtype, bucket) for (dtype, _), bucket in open_buckets.items())


def ddp_name(module: DistributedDataParallel) -> str:
    return f"DistributedDataParallel({type(module.module).__name__})"


def _check_hooks(module: DistributedDataParallel, why: str | None) -> None:
    """Refuse a comm hook if DDP's reducer, which would call it, is not used."""
    for hook in comm_hooks(module):
        raise ParallelError(
            f"{ddp_name(module)} has the comm hook {getattr(hook, '__name__', hook)}, but {why} cannot go through DDP's "
            "reducer, which calls it. Leave the hook out, or use fp32 parameters, on_nonfinite other than 'drop', an objective "
            "that is not coupled, and batch_norm other than 'exact'."
        )


def _check_reduced(module: DistributedDataParallel, *, is_called: bool) -> None:
    """Refuse gradients that DDP did not sum over ranks; DDP itself notices in its next forward, after the step."""
    if not is_called:
        if any(parameter.grad is not None for parameter in module.parameters()):
            raise ParallelError(
                f"the objective did not call {ddp_name(module)} itself, so its gradients were not summed over ranks. Call "
                "the wrapped model, as model(...), not model.module(...) or a method of it."
            )
        return
    try:
        end_reduction(module)
    except RuntimeError as error:
        if "finished reduction" not in str(error):
            raise
        raise ParallelError(
            f"some parameters of {ddp_name(module)} had no gradient in the last micro-batch of this rank, and their sum over "
            "ranks never ran. Wrap the model with find_unused_parameters=True."
        ) from error
