"""BatchNorm over the whole batch, each micro-batch in its own forward: the statistics meet, and stay in the graph."""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import checkpoint

from anybatch.batch_norm.layers import Call, Layers, replaced
from anybatch.batch_norm.lockstep import Lockstep
from anybatch.batch_norm.statistics import MeanAndVariance, of_every_rank, pool, pool_over_ranks, update_running
from anybatch.core import NormLayer, Ranks, is_in_backward, is_low
from anybatch.errors import BatchError, UpdateError


@contextmanager
def pooled(
    layers: Layers,
    lockstep: Lockstep[Any],
    accepts: Callable[[tuple[Tensor, Tensor]], bool],
    not_finite: set[int],
    *,
    ranks: Ranks,
    num_own: int,
) -> Iterator[None]:
    """Let the layers normalise by mean and variance over all micro-batches of `lockstep`, on all ranks.

    Micro-batches from number `num_own` on are borrowed from another rank, and have no part in the statistics. Running
    statistics get the one update of the big batch. `not_finite` collects the micro-batches whose own statistics `accepts`
    refuses at the first layer that met any: after it everybody's are spoilt. Once the forwards have ended the layers are as
    they always are, but refuse to run inside backward.
    """
    exchange = _Exchange(ranks)

    def averaged(name: str, call: Call) -> Tensor:
        """Normalise every row of InstanceNorm by its own statistics; the running ones get the mean over all rows, once."""
        assert call.running_mean is not None
        assert call.running_var is not None
        mean, var = torch.zeros_like(call.running_mean), torch.zeros_like(call.running_var)
        output = call.with_running(mean, var, 1.0)  # momentum 1: what is written is these rows' own
        rows = call.count if lockstep.current < num_own else 0
        own = MeanAndVariance(rows, mean, var, call.momentum, is_averaged=True)
        place = f"InstanceNorm {name!r}"
        lockstep.meet(place, own, lambda parts: update_running(call, *pool_over_ranks(ranks, [_pool_own(parts)])))
        return output

    def compute(name: str, layer: NormLayer, call: Call) -> Tensor:
        if lockstep.is_over or lockstep.current == lockstep.numbers[0]:
            _check_not_repeated(name)
        if lockstep.is_over:
            return call.as_asked()  # a loss over the representations of all rows
        if call.is_averaged:
            return averaged(name, call)
        own_mean, own_var = _Moments.apply(call.input)  # type: ignore[no-untyped-call, unused-ignore]

        def meet(parts: list[MeanAndVariance]) -> MeanAndVariance:
            together = exchange.pool(parts)
            if not not_finite and not accepts((together.mean, together.var)):
                both = zip(lockstep.numbers, parts, strict=True)
                not_finite.update(number for number, part in both if not accepts((part.mean, part.var)))
            if together.count == 1:
                raise BatchError(
                    f"BatchNorm {name!r} got one value per channel in the whole batch: it has no variance. Give more rows."
                )
            update_running(call, together)
            if layer.training and layer.track_running_stats and layer.num_batches_tracked is not None:
                layer.num_batches_tracked.sub_(len(parts) - 1)  # every micro-batch has counted the one batch
            return together

        is_own = lockstep.current < num_own
        own = MeanAndVariance(call.count if is_own else 0, own_mean, own_var, call.momentum)
        together = lockstep.meet(f"BatchNorm {name!r}", own, meet)
        weight, bias = (
            None if affine is None else affine.to(together.mean.dtype) for affine in (call.weight, call.bias)
        )
        output: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call, unused-ignore]
            call.input, together.mean, together.var, weight, bias, call.eps
        )
        return output

    with replaced(layers, compute):
        yield


def _pool_own(parts: list[MeanAndVariance]) -> MeanAndVariance:
    return pool(parts) if any(part.count for part in parts) else parts[0]


def _check_not_repeated(name: str) -> None:
    """Refuse a layer in a checkpointed block: backward computes it again, for one micro-batch without the others."""
    callers = (frame for frame, _ in traceback.walk_stack(sys._getframe()))
    if is_in_backward() or any(frame.f_code.co_filename == checkpoint.__file__ for frame in callers):
        raise UpdateError(
            f"batch_norm='exact': {name!r} is inside a block under checkpointing, which backward computes again for each "
            "micro-batch by itself, without the statistics of the others. Checkpoint the parts between the BatchNorms, or "
            "none: offload= keeps what backward needs out of memory. Or use batch_norm='micro'."
        )


class _Exchange:
    """Statistics of all ranks, and their gradients summed over all ranks on the way back.

    Each exchange hangs on the one before it, so that on every rank the sums come in the reverse order of the forward.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._chain = torch.zeros((), requires_grad=True)

    def pool(self, parts: list[MeanAndVariance]) -> MeanAndVariance:
        if self._ranks.size == 1:
            return pool(parts)
        own = _pool_own(parts)
        every = [told for (told,) in of_every_rank(self._ranks, [own])]
        every[self._ranks.rank] = own  # with its graph
        together = pool(every)  # in the order of the ranks, so that all have the same to the bit
        mean, var, self._chain = _SumGradients.apply(together.mean, together.var, self._chain, self._ranks)  # type: ignore[no-untyped-call, unused-ignore]
        return MeanAndVariance(together.count, mean, var, together.momentum)


class _SumGradients(torch.autograd.Function):
    """Statistics as they are; their gradients are what every rank's rows have of them, added up."""

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


# Autograd could do both of these from var_mean and y = a x + c: that takes 5 to 12 times as long as torch's own BatchNorm in
# forward on a CPU, twice in backward, and loses digits where |mean| is much larger than the deviation.


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
        # slope * x + offset per channel, by the kernel that does just this in one pass
        neutral = torch.zeros_like(mean), torch.ones_like(mean)
        grad: Tensor = torch.native_batch_norm(x, slope, offset, *neutral, False, 0.0, 0.0)[0]
        return grad


class _Normalise(torch.autograd.Function):
    """`(x - mean) / sqrt(var + eps) * weight + bias`, with gradients by mean and variance too."""

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
