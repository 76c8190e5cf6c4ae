"""What an update would take on many ranks, on paper."""

from anybatch.projection.network import Network, Pass, Projection, Sharding

__all__ = [
    "Network",
    "Pass",
    "Projection",
    "Sharding",
]
