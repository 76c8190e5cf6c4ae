"""Splits that look for their own size while training goes on."""

from anybatch.batches.tuning.auto import Auto, Choice
from anybatch.batches.tuning.doubling import Doubling
from anybatch.batches.tuning.way_back import WayBack

__all__ = [
    "Auto",
    "Choice",
    "Doubling",
    "WayBack",
]
