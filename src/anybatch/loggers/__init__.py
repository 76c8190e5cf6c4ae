"""Callables for `Update(on_update=...)`: where the numbers of an update go."""

from anybatch.loggers.event_files import TensorBoardLogger
from anybatch.loggers.live_bar import ProgressBar

__all__ = ["ProgressBar", "TensorBoardLogger"]
