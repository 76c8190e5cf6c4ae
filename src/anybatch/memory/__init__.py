"""Predicting an update's peak memory, measuring it, choosing what fits."""

from typing import TYPE_CHECKING

from anybatch.lazy import lazily

if TYPE_CHECKING:
    from anybatch.memory.fit import Fit
    from anybatch.memory.fitted import Fitted
    from anybatch.memory.from_config import plan_config
    from anybatch.memory.large_models import parameters_on_meta
    from anybatch.memory.planning import plan
    from anybatch.memory.predicting import Breakdown, Checkpointing, Plan, RankedWay, SizePeak, WayToFit
    from anybatch.memory.tracing import (
        bytes_of,
        drop_gradients,
        measure_peak,
        metered,
        optimizer_tensors,
        standing_tensors,
        takes_buffers,
    )
else:
    __getattr__ = lazily(__name__)

__all__ = [
    "Breakdown",
    "Checkpointing",
    "Fit",
    "Fitted",
    "Plan",
    "RankedWay",
    "SizePeak",
    "WayToFit",
    "bytes_of",
    "drop_gradients",
    "measure_peak",
    "metered",
    "optimizer_tensors",
    "parameters_on_meta",
    "plan",
    "plan_config",
    "standing_tensors",
    "takes_buffers",
]
