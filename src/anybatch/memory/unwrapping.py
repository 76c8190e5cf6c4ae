"""The module that is planned, without the wrapper that compiles it or synchronises it over ranks."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anybatch.errors import PlanError
from anybatch.memory.tracing import bytes_of
from anybatch.parallel import peeled, wrapping_of


def without_wrappers(model: nn.Module) -> tuple[nn.Module, int]:
    """The module inside `torch.compile` and `DistributedDataParallel`, and the bytes of the buckets that the latter keeps.

    Fake tensors follow a module's ops, which a compiler may fuse into fewer. A rank tries its own rows alone: a wrapped copy
    would wait for the other ranks, which may try other sizes.
    """
    *wrappers, model = peeled(model)
    buckets = sum(
        bytes_of(parameter for parameter in wrapper.parameters() if parameter.requires_grad)
        for wrapper in wrappers
        if isinstance(wrapper, DistributedDataParallel)
    )
    inside = wrapping_of(model)
    if inside.sharded or inside.replicated:
        how = "sharded by fully_shard" if inside.sharded else "wrapped in DistributedDataParallel in parts"
        raise PlanError(
            f"this {type(model).__name__} is {how}, and a copy to try an update on would wait for the other ranks. Plan the "
            "model before it is wrapped."
        )
    return model, buckets
