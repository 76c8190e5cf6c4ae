"""Predicting an update's peak memory, measuring it, choosing what fits."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anybatch.memory.fit import Fit, fastest_fit
    from anybatch.memory.fitting import Fitted
    from anybatch.memory.from_config import parameters_on_meta, plan_config
    from anybatch.memory.planning import MARGIN, plan
    from anybatch.memory.predicting import Breakdown, Checkpointing, Plan, SizePeak, WayToFit
    from anybatch.memory.tracing import (
        bytes_of,
        drop_gradients,
        measure_peak,
        metered,
        optimizer_tensors,
        standing_tensors,
    )

__all__ = [
    "Breakdown",
    "Checkpointing",
    "Fit",
    "Fitted",
    "MARGIN",
    "Plan",
    "SizePeak",
    "WayToFit",
    "bytes_of",
    "drop_gradients",
    "fastest_fit",
    "measure_peak",
    "metered",
    "optimizer_tensors",
    "parameters_on_meta",
    "plan",
    "plan_config",
    "standing_tensors",
]
_MODULES = {
    "fit": ("Fit",),
    "fitted": ("Fitted",),
    "from_config": ("plan_config",),
    "large_models": ("parameters_on_meta",),
    "planning": ("plan",),
    "predicting": ("Breakdown", "Checkpointing", "Plan", "RankedWay", "SizePeak", "WayToFit"),
    "tracing": (
        "bytes_of",
        "drop_gradients",
        "measure_peak",
        "metered",
        "optimizer_tensors",
        "standing_tensors",
        "takes_buffers",
    ),
}
"""The names of each module, which is loaded when one of them is first asked for: most of them load torch."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        for module, names in _MODULES.items():
            if name in names:
                return getattr(import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
