"""How this process was started, alone or as a rank, and the model spread over the ranks."""

from typing import TYPE_CHECKING

from anybatch.lazy import lazily

if TYPE_CHECKING:
    from anybatch.training.launch.spreading import from_first_rank, ranks_of_group, reshard, spread_over_ranks
    from anybatch.training.launch.torchrun import Launch, check_alone, find_launch, joined_ranks
else:
    __getattr__ = lazily(__name__)

__all__ = [
    "Launch",
    "check_alone",
    "find_launch",
    "from_first_rank",
    "joined_ranks",
    "ranks_of_group",
    "reshard",
    "spread_over_ranks",
]
