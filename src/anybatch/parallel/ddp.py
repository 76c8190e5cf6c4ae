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
    active_ddp_put_back,
    comm_hooks,
    end_reduction,
    forget_used_parameters,
    sync_buffers_again,
    sync_buffers_once,
)

BUCKET_BYTES = 25 * 2**20
"""What DDP's own reducer sends at a time."""


@torch.no_grad()
def sum_in_buckets(ranks: Ranks, parameters: Sequence[nn.Parameter], *, divisor: float = 1.0) -> None:
    """`.grad = sum of every rank's .grad / divisor`, on every rank; it stays None where it is None on all ranks.

    One all-reduce per bucket. Each bucket ends with a mark per parameter that tells whether any rank has a gradient. A
    sparse gradient becomes dense.
    """
    if ranks.size == 1:
        return
    for dtype, bucket in _buckets(parameters):
        sizes = [parameter.numel() for parameter in bucket]
        flat = torch.zeros(sum(sizes) + len(bucket), dtype=dtype, device=bucket[0].device)
        *pieces, marks = flat.split([*sizes, len(bucket)])
        for number, (parameter, piece) in enumerate(zip(bucket, pieces, strict=True)):
            if parameter.grad is not None:
                piece.view(parameter.shape).copy_(parameter.grad.to_dense())
                marks[number] = 1
        dist.all_reduce(flat, group=ranks.group)
        if divisor != 1.0:
            flat.div_(divisor)
        for parameter, piece, mark in zip(bucket, pieces, marks.tolist(), strict=True):
            total = piece.view(parameter.shape)
            if mark <= 0:
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


@dataclass(frozen=True, slots=True)
class Replicated:
    """The engine of modules in `DistributedDataParallel`."""

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
        why = needs.own_reduction or self._low_precision()
        is_done = last_pass_fits and not (leaves_out and any(module.find_unused_parameters for module in self.modules))
        is_reduced = why is None and (is_done or any(comm_hooks(module) for module in self.modules))
        for module in self.modules:
            if not is_reduced:
                _check_hooks(module, why)
            # ahead of all passes of a batch: the first of one rank may be the last of another, which waits for the others there
            sync_buffers_once(module)
        return Reduced(self.modules, self.ranks) if is_reduced else Bucketed(self.modules, self.ranks)

    def _low_precision(self) -> str | None:
        """Say why DDP's reducer cannot be used for these parameters: it sums in their own dtype."""
        trained = (parameter for module in self.modules for parameter in module.parameters() if parameter.requires_grad)
        return "the fp32 sums of bf16 and fp16 parameters" if any(is_low(parameter) for parameter in trained) else None


@dataclass(frozen=True, slots=True)
class _OfModules(Sync):
    modules: tuple[DistributedDataParallel, ...]
    ranks: Ranks

    def reset(self) -> None:
        """Do what DDP does at the end of a synchronised pass, for passes that were not, or died.

        Buffers are sent again on every rank, because a rank that failed in its first forward will send its own again.
        Parameters that these passes used are not taken for used in the next.
        """
        for module in self.modules:
            sync_buffers_again(module)
            forget_used_parameters(module)


@dataclass(frozen=True, slots=True)
class Reduced(_OfModules):
    """DDP's reducer averages in the last backward pass, while it runs; the others run in `no_sync`, forward and backward."""

    reduces_in_last_backward: bool = True

    @property
    def factor(self) -> float:
        return float(self.ranks.size)

    def around_pass(self, *, is_last: bool) -> AbstractContextManager[object]:
        return self._reduced() if is_last else _unsynchronised(self.modules)

    @contextmanager
    def _reduced(self) -> Iterator[None]:
        called: set[nn.Module] = set()
        hooks = [module.register_forward_pre_hook(lambda module, _: called.add(module)) for module in self.modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for module in self.modules:
            _check_reduced(module, is_called=module in called)

    def forward_only(self) -> AbstractContextManager[object]:
        return _unsynchronised(self.modules)

    def close(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum over ranks the gradients of parameters outside DDP's modules, such as a criterion's."""
        inside = {parameter for module in self.modules for parameter in module.parameters()}
        sum_in_buckets(self.ranks, [p for p in parameters if p not in inside], divisor=self.factor)


@dataclass(frozen=True, slots=True)
class Bucketed(_OfModules):
    """DDP synchronises no pass; gradients are summed over ranks in buckets, at the close."""

    factor: float = 1.0
    reduces_in_last_backward: bool = False

    @contextmanager
    def around_pass(self, *, is_last: bool) -> Iterator[None]:
        with active_ddp_put_back(), _unsynchronised(self.modules):
            yield

    def forward_only(self) -> AbstractContextManager[object]:
        return self.around_pass(is_last=False)

    def close(self, parameters: Sequence[nn.Parameter]) -> None:
        sum_in_buckets(self.ranks, parameters)
        self.reset()


def _unsynchronised(modules: Sequence[DistributedDataParallel]) -> AbstractContextManager[object]:
    return around(module.no_sync() for module in modules)


def _name(module: DistributedDataParallel) -> str:
    return f"DistributedDataParallel({type(module.module).__name__})"


def _check_hooks(module: DistributedDataParallel, why: str | None) -> None:
    """Refuse a comm hook where DDP's reducer, which alone calls it, is not used."""
    for hook in comm_hooks(module):
        raise ParallelError(
            f"{_name(module)} has the comm hook {getattr(hook, '__name__', hook)}, but {why} cannot go through DDP's reducer, "
            "which calls it. Leave the hook out, or use fp32 parameters, on_nonfinite other than 'drop', an objective that is "
            "not coupled, and batch_norm other than 'exact'."
        )


def _check_reduced(module: DistributedDataParallel, *, is_called: bool) -> None:
    """Refuse gradients that DDP did not sum over ranks; DDP itself finds out in its next forward, after the step."""
    if not is_called:
        if any(parameter.grad is not None for parameter in module.parameters()):
            raise ParallelError(
                f"the objective did not call {_name(module)} itself, so its gradients were not summed over ranks. Call "
                "the wrapped model, as model(...), not model.module(...) or a method of it."
            )
        return
    try:
        end_reduction(module)
    except RuntimeError as error:
        if "finished reduction" not in str(error):
            raise
        raise ParallelError(
            f"some parameters of {_name(module)} had no gradient in the last micro-batch of this rank, and their sum over "
            "ranks never ran. Wrap the model with find_unused_parameters=True."
        ) from error
