"""Summing gradients over ranks in buckets of our own: where torch's reducer cannot be used, or does not look."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anybatch.core import Ranks

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
    for bucket in _buckets(parameters):
        sizes = [parameter.numel() for parameter in bucket]
        dtype = _dtype(bucket[0])
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
            if mark > 0:
                _set(parameter, piece.view(parameter.shape))


def _set(parameter: nn.Parameter, total: Tensor) -> None:
    if parameter.grad is None or parameter.grad.is_sparse:
        parameter.grad = total.clone()
    else:
        parameter.grad.copy_(total)


def _dtype(parameter: nn.Parameter) -> torch.dtype:
    dtype: torch.dtype = parameter.grad_dtype or parameter.dtype
    return dtype


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one dtype and device, in order, up to the size of a bucket; the same on every rank."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in parameters:
        kind = (_dtype(parameter), parameter.device)
        num_bytes = parameter.numel() * kind[0].itemsize
        if kind in open_buckets and filled[kind] + num_bytes > BUCKET_BYTES:
            yield open_buckets.pop(kind)
        if kind not in open_buckets:
            open_buckets[kind], filled[kind] = [], 0
        open_buckets[kind].append(parameter)
        filled[kind] += num_bytes
    yield from open_buckets.values()
