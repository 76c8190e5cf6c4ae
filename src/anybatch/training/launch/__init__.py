"""How this process was started, alone or as a rank, and the model spread over the ranks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anybatch.training.launch.spreading import from_first_rank, ranks_of_group, reshard, spread_over_ranks
    from anybatch.training.launch.torchrun import Launch, check_alone, find_launch, joined_ranks

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
_MODULES = {
    "spreading": (
        "from_first_rank",
        "ranks_of_group",
        "reshard",
        "spread_over_ranks",
    ),
    "torchrun": (
        "Launch",
        "check_alone",
        "find_launch",
        "joined_ranks",
    ),
}
"""The names of each module, which is loaded when one of them is first asked for: most of them load torch."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        for module, names in _MODULES.items():
            if name in names:
                return getattr(import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
