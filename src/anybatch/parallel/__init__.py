"""Many ranks: DDP, FSDP2, and dealing one batch to them."""

from anybatch.parallel.ddp import BUCKET_BYTES
from anybatch.parallel.dealing import GlobalBatches, deal_rows, repeated_rows, warn_of_repeated_rows
from anybatch.parallel.fsdp import reshard_all
from anybatch.parallel.torch_private_fsdp import sharded_kind
from anybatch.parallel.wrapping import check_ranks, parallelism_for, peeled, unreplicated, unwrapped, wrapping_of
