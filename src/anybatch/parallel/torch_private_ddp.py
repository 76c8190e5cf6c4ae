"""Private names of DDP that we use."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from anybatch.core import demand


def check_ddp(module: DistributedDataParallel) -> None:
    """Refuse a release of torch whose DDP lacks a name that we use."""
    wrapper = "DistributedDataParallel"
    demand(module, "_comm_hooks", "_sync_buffers", "_active_ddp_module", "reducer", wrapper=wrapper)
    demand(module, "will_sync_module_buffers", "require_forward_param_sync", wrapper=wrapper)
    demand(module.reducer, "_rebuild_buckets", "_reset_state", wrapper=wrapper)


def comm_hooks(module: DistributedDataParallel) -> list[Any]:
    """List the user's hooks that DDP's reducer calls instead of its all-reduce."""
    return [hook for hook, _ in module._comm_hooks]


def sync_buffers_once(module: DistributedDataParallel) -> None:
    """Broadcast rank 0's buffers, as DDP's first forward after an update does; later forwards do not."""
    if module.will_sync_module_buffers():
        module._sync_buffers()
    module.require_forward_param_sync = False


def sync_buffers_again(module: DistributedDataParallel) -> None:
    """Let DDP broadcast rank 0's buffers in its next forward, as after a synchronised pass."""
    module.require_forward_param_sync = True


def forget_used_parameters(module: DistributedDataParallel) -> None:
    """Clear the set of used parameters, which every backward pass adds to and only a synchronised one clears."""
    if module.find_unused_parameters:
        module.reducer._reset_state()  # without find_unused_parameters it would also rebuild the buckets


def end_reduction(module: DistributedDataParallel) -> None:
    """Do what DDP's next forward does first: raise RuntimeError if the last reduction never ended."""
    module.reducer._rebuild_buckets()


@contextmanager
def restoring_active_ddp() -> Iterator[None]:
    """Restore the active DDP module after forwards that overlap, each of which restores what the one before had set."""
    outside = DistributedDataParallel._active_ddp_module
    try:
        yield
    finally:
        DistributedDataParallel._active_ddp_module = outside  # else the class keeps the model and its group alive
