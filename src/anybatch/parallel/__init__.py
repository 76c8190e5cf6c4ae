"""Many ranks: which they are, when their gradients are synchronised, what is summed over them. No objectives here."""

from anybatch.parallel.buckets import BUCKET_BYTES, sum_by_hand
from anybatch.parallel.engine import ALONE, Turn, engine_for
from anybatch.parallel.ranks import ONE_PROCESS, Ranks
from anybatch.parallel.wrapping import is_sharded, own_part, wrapping_of

__all__ = [
    "ALONE",
    "BUCKET_BYTES",
    "ONE_PROCESS",
    "Ranks",
    "Turn",
    "engine_for",
    "is_sharded",
    "own_part",
    "sum_by_hand",
    "wrapping_of",
]
