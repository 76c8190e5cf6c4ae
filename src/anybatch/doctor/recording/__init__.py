"""Watching a process that trains: the only part of the doctor that imports torch, and that only where torch is there."""

from typing import TYPE_CHECKING

from anybatch.lazy import lazily

if TYPE_CHECKING:
    from anybatch.doctor.recording.installing import TorchImported, begin_watching, end_watching, watch_until_exit
    from anybatch.doctor.recording.tape import Ending, Watch
else:
    __getattr__ = lazily(__name__)

__all__ = ["Ending", "TorchImported", "Watch", "begin_watching", "end_watching", "watch_until_exit"]
