"""Updates tried on copies: what they allocate, op by op."""

from anybatch.memory.tracing.kept_memory import KeptMemory
from anybatch.memory.tracing.kernel_buffers import takes_buffers
from anybatch.memory.tracing.meter import (
    bytes_of,
    drop_gradients,
    learning_tensors,
    measure_peak,
    metered,
    optimizer_tensors,
    standing_tensors,
)
from anybatch.memory.tracing.moments import MemoryKind, Moment, Moments, highest
from anybatch.memory.tracing.probe import (
    NODE_BYTES,
    NORM_BYTES,
    FakeProbe,
    Probe,
    RealProbe,
    TrialSetup,
    without_warnings,
)
from anybatch.memory.tracing.recorder import ELSEWHERE, Recorder, Timeline
from anybatch.memory.tracing.trial_copies import Parts, is_real, is_watched, keeping_random_states, undone

__all__ = [
    "ELSEWHERE",
    "FakeProbe",
    "KeptMemory",
    "MemoryKind",
    "Moment",
    "Moments",
    "NODE_BYTES",
    "NORM_BYTES",
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
    "is_watched",
    "keeping_random_states",
    "learning_tensors",
    "measure_peak",
    "metered",
    "optimizer_tensors",
    "standing_tensors",
    "takes_buffers",
    "undone",
    "without_warnings",
]
