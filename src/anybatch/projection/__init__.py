"""What an update would take on many ranks, on paper."""

from typing import TYPE_CHECKING

from anybatch.lazy import lazily

if TYPE_CHECKING:
    from anybatch.projection.network import Network, PassSeconds, Projection, Sharding
    from anybatch.projection.pass_timing import time_pass
else:
    __getattr__ = lazily(__name__)

__all__ = [
    "Network",
    "PassSeconds",
    "Projection",
    "Sharding",
    "time_pass",
]
