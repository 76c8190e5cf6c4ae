"""BatchNorm over the whole batch: micro-batches in lockstep share their statistics, which stay in the graph."""

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import checkpoint

from anybatch.batch_norm.layers import Call
from anybatch.batch_norm.lockstep import Lockstep
from anybatch.batch_norm.statistics import (
    MeanAndVariance,
    of_every_rank,
    own_statistics,
    pool,
    pool_over_ranks,
    update_running,
)
from anybatch.core import NormLayer, Ranks, is_in_backward, is_low
from anybatch.errors import BatchError, UpdateError


@dataclass(slots=True)
class PooledStatistics:
    """Computes norm layers by mean and variance over all micro-batches of `lockstep`, on all ranks.

    Micro-batches from number `num_own` on are borrowed from another rank and do not count. Running statistics get one update.
    After the forwards the layers work as usual, but refuse to run inside backward.
    """

    lockstep: Lockstep[Any]
    accepts: Callable[[tuple[Tensor, Tensor]], bool]
    ranks: Ranks
    num_own: int
    not_finite: set[int] = field(default_factory=set)
    """Micro-batches at fault at the first layer with statistics that `accepts` refuses; later layers are only affected."""
    _chain: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))
    """Links the exchanges between ranks, so that their backwards run in the reverse order on every rank."""

    def compute(self, name: str, layer: NormLayer, call: Call) -> Tensor:
        if self.lockstep.is_over or self.lockstep.current == self.lockstep.numbers[0]:
            _check_not_repeated(name)
        if self.lockstep.is_over:
            return call.as_asked()  # a loss over the representations of all rows
        if call.is_averaged:  # InstanceNorm: only its running statistics depend on the other micro-batches
            output, own = own_statistics(call)
            self._meet(f"InstanceNorm {name!r}", own, lambda parts: self._update_average(call, parts))
            return output
        mean, var = _Moments.apply(call.input)  # type: ignore[no-untyped-call, unused-ignore]
        own = MeanAndVariance(call.count, mean, var, call.momentum)
        together = self._meet(f"BatchNorm {name!r}", own, lambda parts: self._update(name, layer, call, parts))
        weight, bias = (one if one is None else one.to(together.mean.dtype) for one in (call.weight, call.bias))
        return _Normalise.apply(call.input, together.mean, together.var, weight, bias, call.eps)  # type: ignore[no-any-return, no-untyped-call, unused-ignore]

    def _meet(
        self, place: str, own: MeanAndVariance, pool: Callable[[list[MeanAndVariance]], MeanAndVariance]
    ) -> MeanAndVariance:
        return self.lockstep.meet(place, own if self.lockstep.current < self.num_own else replace(own, count=0), pool)

    def _update_average(self, call: Call, parts: list[MeanAndVariance]) -> MeanAndVariance:
        (together,) = pool_over_ranks(self.ranks, [pool(parts)])
        update_running(call, together)
        return together

    def _update(self, name: str, layer: NormLayer, call: Call, parts: list[MeanAndVariance]) -> MeanAndVariance:
        together = self._pool(parts)
        if not self.not_finite and not self.accepts((together.mean, together.var)):
            both = zip(self.lockstep.numbers, parts, strict=True)
            self.not_finite.update(number for number, part in both if not self.accepts((part.mean, part.var)))
        if together.count == 1:
            raise BatchError(
                f"BatchNorm {name!r} got one value per channel in the whole batch: it has no variance. Give more rows."
            )
        update_running(call, together)
        if layer.training and layer.track_running_stats and layer.num_batches_tracked is not None:
            layer.num_batches_tracked.sub_(len(parts) - 1)  # every micro-batch has counted the one batch
        return together

    def _pool(self, parts: list[MeanAndVariance]) -> MeanAndVariance:
        own = pool(parts)
        if self.ranks.size == 1:
            return own
        every = [gathered for (gathered,) in of_every_rank(self.ranks, [own])]
        every[self.ranks.rank] = own  # with its graph
        together = pool(every)  # in the order of the ranks, so that all have the same bits
        mean, var, self._chain = _SumGradients.apply(together.mean, together.var, self._chain, self.ranks)  # type: ignore[no-untyped-call, unused-ignore]
        return replace(together, mean=mean, var=var)


def _check_not_repeated(name: str) -> None:
    """Refuse a layer in a checkpointed block: backward computes it again, for one micro-batch without the others."""
    callers = (frame for frame, _ in traceback.walk_stack(sys._getframe()))
    if is_in_backward() or any(frame.f_code.co_filename == checkpoint.__file__ for frame in callers):
        raise UpdateError(
            f"batch_norm='exact': {name!r} is inside a block under checkpointing, which backward computes again for each "
            "micro-batch by itself, without the statistics of the others. Checkpoint the parts between the BatchNorms, or "
            "none: offload= keeps what backward needs out of memory. Or use batch_norm='micro'."
        )


class _SumGradients(torch.autograd.Function):
    """The identity; its backward sums the gradients of the statistics over ranks."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, var: Tensor, chain: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
        ctx.ranks = ranks
        return mean.clone(), var.clone(), chain.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mean: Tensor, grad_var: Tensor, grad_chain: Tensor) -> tuple[Tensor | None, ...]:
        ranks = ctx.ranks
        both = ranks.all_rows(torch.stack([grad_mean, grad_var])[None], [1] * ranks.size).sum(0)
        return both[0], both[1], grad_chain, None


# Autograd through var_mean and y = a x + c would replace the two functions below. It takes 5 to 12 times as long as torch's own
# BatchNorm in forward on a CPU, twice as long in backward, and loses digits where |mean| is much larger than the deviation.


class _Moments(torch.autograd.Function):
    """Mean and biased variance per channel, in fp32 or better."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.float32 if is_low(x) else x.dtype
        unused = torch.zeros(2, x.shape[1], dtype=dtype, device=x.device)
        mean, var = torch.batch_norm_update_stats(x, unused[0], unused[1], 0.0)
        ctx.save_for_backward(x, mean)
        return mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mean: Tensor, grad_var: Tensor) -> Tensor:
        """d mean / d x = 1 / n,  d var / d x = 2 (x - mean) / n"""
        x, mean = ctx.saved_tensors
        count = x.numel() / x.shape[1]
        slope = 2 * grad_var / count
        offset = grad_mean / count - slope * mean
        # slope * x + offset per channel, by a kernel that computes it in one pass
        neutral = torch.zeros_like(mean), torch.ones_like(mean)
        grad: Tensor = torch.native_batch_norm(x, slope, offset, *neutral, False, 0.0, 0.0)[0]
        return grad


class _Normalise(torch.autograd.Function):
    """`(x - mean) / sqrt(var + eps) * weight + bias`, differentiable by mean and variance too."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        ctx.save_for_backward(x, mean, var, weight)
        ctx.eps = eps
        output: Tensor = torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, var, weight = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad, x, weight, mean, var, None, None, False, ctx.eps, [True, True, True]
        )
        slope = torch.rsqrt(var + ctx.eps) * (1 if weight is None else weight)
        grad_mean = -grad_bias * slope
        grad_var = -0.5 * grad_weight * slope * torch.rsqrt(var + ctx.eps)
        if weight is None:
            return grad_x, grad_mean, grad_var, None, None, None
        return grad_x, grad_mean, grad_var, grad_weight, grad_bias if ctx.needs_input_grad[4] else None, None
