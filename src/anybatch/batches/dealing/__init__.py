"""One batch dealt to many ranks."""

from anybatch.batches.dealing.dealt import Dealt, deal_rows
from anybatch.batches.dealing.global_batches import GlobalBatches

__all__ = [
    "Dealt",
    "GlobalBatches",
    "deal_rows",
]
