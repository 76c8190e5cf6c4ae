"""Updates tried on copies: what they allocate, op by op."""

from anybatch.memory.tracing.meter import (
    bytes_of,
    drop_gradients,
    measure_peak,
    metered,
    optimizer_tensors,
    standing_tensors,
)
from anybatch.memory.tracing.probe import FakeProbe, Probe, RealProbe, Setup
from anybatch.memory.tracing.recorder import Kind, Timeline
from anybatch.memory.tracing.trial_copies import Parts, is_real, undisturbed

__all__ = [
    "FakeProbe",
    "Kind",
    "Parts",
    "Probe",
    "RealProbe",
    "Setup",
    "Timeline",
    "bytes_of",
    "drop_gradients",
    "is_real",
    "measure_peak",
    "metered",
    "optimizer_tensors",
    "standing_tensors",
    "undisturbed",
]
