"""Updates tried on copies: what they allocate, op by op."""

from anybatch.memory.tracing.meter import (
    bytes_of,
    drop_gradients,
    measure_peak,
    metered,
    optimizer_tensors,
    standing_tensors,
)
from anybatch.memory.tracing.probe import NODE_BYTES, NORM_BYTES, FakeProbe, Probe, RealProbe, TrialSetup
from anybatch.memory.tracing.recorder import Moment, Moments, Timeline, highest
from anybatch.memory.tracing.trial_copies import Parts, is_real, is_watched, keeping_random_states

__all__ = [
    "FakeProbe",
    "Moment",
    "Moments",
    "NODE_BYTES",
    "NORM_BYTES",
    "Parts",
    "Probe",
    "RealProbe",
    "Timeline",
    "TrialSetup",
    "bytes_of",
    "drop_gradients",
    "highest",
    "is_real",
    "is_watched",
    "keeping_random_states",
    "measure_peak",
    "metered",
    "optimizer_tensors",
    "standing_tensors",
]
