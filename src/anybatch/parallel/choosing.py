"""Which engine a model needs."""

from torch import nn

from anybatch.core import ALONE, Engine, Ranks
from anybatch.parallel.ddp import Replicated
from anybatch.parallel.fsdp import Sharded
from anybatch.parallel.wrapping import wrapping_of


def engine_for(model: nn.Module, *, reshard: bool) -> Engine:
    """What synchronises the gradients of `model`."""
    ranks = Ranks.of(model)
    wrapping = wrapping_of(model)
    if wrapping.sharded:
        return Sharded(wrapping.sharded, ranks, reshard)
    return Replicated(wrapping.replicated, ranks) if wrapping.replicated else ALONE
