"""Updates tried on copies: what they allocate, op by op."""

from anybatch.memory.tracing.meter import (
    bytes_of,
    drop_gradients,
    measure_peak,
    metered,
    optimizer_tensors,
    standing_tensors,
)
from anybatch.memory.tracing.moments import MemoryKind, Moment, Moments, highest
from anybatch.memory.tracing.probe import FakeProbe, Probe, RealProbe, TrialSetup
from anybatch.memory.tracing.recorder import Recorder, Timeline
from anybatch.memory.tracing.trial_copies import Parts, is_real, keeping_random_states

__all__ = [
    "FakeProbe",
    "MemoryKind",
    "Moment",
    "Moments",
    "Parts",
    "Probe",
    "RealProbe",
    "Recorder",
    "Timeline",
    "TrialSetup",
    "bytes_of",
    "drop_gradients",
    "highest",
    "is_real",
    "keeping_random_states",
    "measure_peak",
    "metered",
    "optimizer_tensors",
    "standing_tensors",
]
