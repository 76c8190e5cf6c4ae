"""Many ranks: DDP, FSDP2, and dealing one batch to them."""

from anybatch.parallel.buckets import BUCKET_BYTES
from anybatch.parallel.choosing import engine_for
from anybatch.parallel.dealing import GlobalBatches
from anybatch.parallel.dealt import deal_rows
from anybatch.parallel.fsdp import reshard_all
from anybatch.parallel.sampler_repeats import repeated_rows, warn_of_repeated_rows
from anybatch.parallel.torch_private_fsdp import sharded_kind
from anybatch.parallel.wrapping import peeled, unreplicated, unwrapped, wrapping_of
