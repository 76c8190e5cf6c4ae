"""Many ranks: which they are, when their gradients are synchronised, what is summed over them. No objectives here."""

from anybatch.parallel.buckets import BUCKET_BYTES, sum_in_buckets
from anybatch.parallel.choosing import engine_for
from anybatch.parallel.engine import ALONE, Engine, Needs, Sync
from anybatch.parallel.fsdp import reshard_all
from anybatch.parallel.ranks import ONE_PROCESS, Ranks
from anybatch.parallel.wrapping import peeled, unreplicated, unwrapped, wrapping_of
from anybatch.torch_inside import is_sharded, own_part

__all__ = [
    "ALONE",
    "BUCKET_BYTES",
    "Engine",
    "Needs",
    "ONE_PROCESS",
    "Ranks",
    "Sync",
    "engine_for",
    "is_sharded",
    "own_part",
    "peeled",
    "reshard_all",
    "sum_in_buckets",
    "unreplicated",
    "unwrapped",
    "wrapping_of",
]
