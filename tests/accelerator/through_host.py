"""Collectives of ranks that each have a pretend accelerator: over the host, by gloo, which knows no such device."""

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.accelerator.plugged import NAME

BACKEND = "through_host"


@cache
def group_of_devices() -> Any:
    """The group of all ranks, for tensors on their devices."""
    inner = dist.new_group(backend="gloo")
    make = lambda store, rank, size, timeout: ThroughHost(rank, size, inner)  # noqa: E731
    dist.Backend.register_backend(BACKEND, make, devices=[NAME])
    return dist.new_group(backend=BACKEND)


class ThroughHost(dist.ProcessGroup):
    """Each collective copies to the host, lets gloo do it there, and copies back."""

    def __init__(self, rank: int, size: int, inner: Any) -> None:
        super().__init__(rank, size)
        self._inner = inner

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        operation = dist.ReduceOp.SUM if options is None else options.reduceOp
        for tensor in tensors:
            host = tensor.cpu()
            dist.all_reduce(host, operation, group=self._inner)
            tensor.copy_(host)
        return _done(tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        for tensor in tensors:
            host = tensor.cpu()
            dist.broadcast(host, group_src=options.rootRank, group=self._inner)
            tensor.copy_(host)
        return _done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> Any:
        for every, own in zip(outputs, inputs, strict=True):
            hosts = [torch.empty(one.shape, dtype=one.dtype) for one in every]
            dist.all_gather(hosts, own.cpu(), group=self._inner)
            for one, host in zip(every, hosts, strict=True):
                one.copy_(host)
        return _done(outputs)

    def _allgather_base(self, output: Tensor, own: Tensor, options: Any = None) -> Any:
        host = torch.empty(output.shape, dtype=output.dtype)
        dist.all_gather(list(host.view(self.size(), -1)), own.cpu().flatten(), group=self._inner)
        output.copy_(host)
        return _done(output)

    all_gather_single = _allgather_base

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, options: Any = None) -> Any:
        host = whole.cpu()
        operation = dist.ReduceOp.SUM if options is None else options.reduceOp
        dist.all_reduce(host, dist.ReduceOp.SUM, group=self._inner)
        part = host.view(self.size(), -1)[self.rank()].view(output.shape)
        output.copy_(part / self.size() if operation == dist.ReduceOp.AVG else part)
        return _done(output)

    reduce_scatter_single = _reduce_scatter_base

    def barrier(self, options: Any = None) -> Any:
        dist.barrier(group=self._inner)
        return _done([])


def _done(value: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return torch._C._distributed_c10d._create_work_from_future(future)
