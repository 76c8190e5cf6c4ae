"""Watching a process that trains. torch is loaded when the watch begins, not before."""

from anybatch.doctor.recording.installing import TorchImported, begin_watching, end_watching, watch_until_exit
from anybatch.doctor.recording.watch import Ending, Watch
