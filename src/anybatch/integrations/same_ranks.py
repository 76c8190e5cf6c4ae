"""A model must be spread over as many ranks as its framework runs."""

from anybatch.core import Accumulator
from anybatch.errors import ParallelError


def check_ranks(accumulator: Accumulator, ranks: int) -> None:
    """Refuse a model whose gradients would stay on their ranks, or meet on other ranks than there are."""
    own = accumulator.engine.ranks.size
    if own != ranks:
        raise ParallelError(
            f"{type(accumulator.model).__name__} is spread over {own} of {ranks} ranks, so that gradients would not meet. Let "
            "the framework wrap all of it in DistributedDataParallel, or shard all of it by fully_shard over one mesh of all "
            "ranks."
        )
