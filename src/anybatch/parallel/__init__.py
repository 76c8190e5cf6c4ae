"""Many ranks: which they are, when their gradients are synchronised, what is summed over them. No objectives here."""

from anybatch.parallel.buckets import BUCKET_BYTES, sum_in_buckets
from anybatch.parallel.choosing import engine_for
from anybatch.parallel.engine import ALONE, Engine, Needs, Sync, Turn
from anybatch.parallel.ranks import ONE_PROCESS, Ranks
from anybatch.parallel.wrapping import is_sharded, own_part, wrapping_of

sum_by_hand = sum_in_buckets  # until passes/ is rebuilt

__all__ = [
    "ALONE",
    "BUCKET_BYTES",
    "Engine",
    "Needs",
    "ONE_PROCESS",
    "Ranks",
    "Sync",
    "Turn",
    "engine_for",
    "is_sharded",
    "own_part",
    "sum_by_hand",
    "sum_in_buckets",
    "wrapping_of",
]
