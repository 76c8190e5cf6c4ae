"""What happens in an update, told to whoever listens."""

from anybatch.events.kinds import (
    Accumulate,
    Backward,
    Clip,
    Event,
    Forward,
    ForwardBoundary,
    Load,
    Loss,
    Observer,
    Retry,
    Step,
    Tracker,
    Zero,
    tracker_for,
)

__all__ = [
    "Accumulate",
    "Backward",
    "Clip",
    "Event",
    "Forward",
    "ForwardBoundary",
    "Load",
    "Loss",
    "Observer",
    "Retry",
    "Step",
    "Tracker",
    "Zero",
    "tracker_for",
]
