"""Private names of DDP that we use."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from anybatch.core import demand


def check_ddp(module: DistributedDataParallel) -> None:
    """Refuse a release of torch whose DDP lacks what we use of it."""
    wrapper = "DistributedDataParallel"
    demand(module, "_comm_hooks", "_sync_buffers", "_active_ddp_module", "reducer", wrapper=wrapper)
    demand(module, "will_sync_module_buffers", "require_forward_param_sync", wrapper=wrapper)
    demand(module.reducer, "_rebuild_buckets", "_reset_state", wrapper=wrapper)


def comm_hooks(module: DistributedDataParallel) -> list[Any]:
    """List the user's hooks that DDP's reducer calls instead of its all-reduce."""
    return [hook for hook, _ in module._comm_hooks]


def sync_buffers_once(module: DistributedDataParallel) -> None:
    """Send rank 0's buffers to every rank, as DDP's first forward after an update does; later forwards do not."""
    if module.will_sync_module_buffers():
        module._sync_buffers()
    module.require_forward_param_sync = False


def sync_buffers_again(module: DistributedDataParallel) -> None:
    """Let DDP send rank 0's buffers with its next forward, as after a synchronised pass."""
    module.require_forward_param_sync = True


def forget_used_parameters(module: DistributedDataParallel) -> None:
    """Let DDP find out anew which parameters are used: it marks them in every backward pass, and a synchronised one ends it."""
    if module.find_unused_parameters:
        module.reducer._reset_state()  # elsewhere it would also build the buckets anew


def end_reduction(module: DistributedDataParallel) -> None:
    """Do what DDP's next forward does first: raise RuntimeError where the last reduction never ended."""
    module.reducer._rebuild_buckets()


@contextmanager
def active_ddp_put_back() -> Iterator[None]:
    """Surround forwards under way at the same time, each of which puts back the DDP module that the one before had set."""
    outside = DistributedDataParallel._active_ddp_module
    try:
        yield
    finally:
        DistributedDataParallel._active_ddp_module = outside  # else the class holds the model for ever, and its group
