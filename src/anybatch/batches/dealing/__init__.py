"""One batch dealt to many ranks."""

from anybatch.batches.dealing.dealt import deal_rows
from anybatch.batches.dealing.global_batches import GlobalBatches
from anybatch.batches.dealing.sampler_repeats import repeated_rows, warn_of_repeated_rows

__all__ = [
    "GlobalBatches",
    "deal_rows",
    "repeated_rows",
    "warn_of_repeated_rows",
]
