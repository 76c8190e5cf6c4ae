"""What happens in an update, told to whoever listens."""

from anybatch.events.kinds import (
    Accumulate,
    Backward,
    Clip,
    Event,
    Forward,
    Load,
    Loss,
    Observer,
    Resize,
    Retry,
    Step,
    Zero,
)
from anybatch.events.telling import SILENT, Events, events_for

__all__ = [
    "Accumulate",
    "Backward",
    "Clip",
    "Event",
    "Events",
    "Forward",
    "Load",
    "Loss",
    "Observer",
    "Resize",
    "Retry",
    "SILENT",
    "Step",
    "Zero",
    "events_for",
]
