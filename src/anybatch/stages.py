"""The stages of an update, under their public name: `from anybatch import stages`. They live in `anybatch.events`."""

from anybatch.events import Accumulate, Backward, Clip, Event, Forward, Load, Loss, Observer, Resize, Retry, Step, Zero

__all__ = [
    "Accumulate",
    "Backward",
    "Clip",
    "Event",
    "Forward",
    "Load",
    "Loss",
    "Observer",
    "Resize",
    "Retry",
    "Step",
    "Zero",
]
