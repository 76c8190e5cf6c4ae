"""The recorder: patches torch in the process that trains, and writes a log."""

from anybatch.doctor.recording.installing import Ending, TorchImported, Watch, begin_watching, end_watching
