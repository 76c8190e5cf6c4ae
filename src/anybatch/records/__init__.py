"""What a run leaves on disk: defined once, written by training, read by the report. Knows nothing of torch."""

from anybatch.records.comparison import Arm, ArmEpoch, ArmRun, Comparison
from anybatch.records.json_text import plain
from anybatch.records.over_seeds import Spread, at_epoch, over_runs, spread_of
from anybatch.records.proof_schema import CutRecord, ParameterRecord, ProofRecord
from anybatch.records.results import Results, read_results
from anybatch.records.run_folder import RunFolder, sync_folder
from anybatch.records.run_lock import locked
from anybatch.records.schema import (
    EpochDone,
    MemoryPoint,
    MemorySeen,
    Metric,
    MicroBatchSeen,
    PlanRecord,
    Run,
    RunKind,
    Scalar,
    Scalars,
    Shapes,
    StageTime,
    UpdateDone,
    Values,
    WindowSeen,
)
from anybatch.records.tolerant_reading import read
from anybatch.records.traced_update import Trace, TracedImage, TracedLayer, TracedStage

__all__ = [
    "Arm",
    "ArmEpoch",
    "ArmRun",
    "Comparison",
    "CutRecord",
    "EpochDone",
    "MemoryPoint",
    "MemorySeen",
    "Metric",
    "MicroBatchSeen",
    "ParameterRecord",
    "PlanRecord",
    "ProofRecord",
    "Results",
    "Run",
    "RunFolder",
    "RunKind",
    "Scalar",
    "Scalars",
    "Shapes",
    "Spread",
    "StageTime",
    "Trace",
    "TracedImage",
    "TracedLayer",
    "TracedStage",
    "UpdateDone",
    "Values",
    "WindowSeen",
    "at_epoch",
    "locked",
    "over_runs",
    "plain",
    "read",
    "read_results",
    "spread_of",
    "sync_folder",
]
