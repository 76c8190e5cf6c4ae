"""Watching a process that trains: the only part of the doctor that imports torch, and that only where torch is there."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anybatch.doctor.recording.installing import TorchImported, begin_watching, end_watching, watch_until_exit
    from anybatch.doctor.recording.tape import Ending, Watch

__all__ = ["Ending", "TorchImported", "Watch", "begin_watching", "end_watching", "watch_until_exit"]
_MODULES = {
    "installing": (
        "TorchImported",
        "begin_watching",
        "end_watching",
        "watch_until_exit",
    ),
    "tape": (
        "Ending",
        "Watch",
    ),
}
"""The names of each module, which is loaded when one of them is first asked for: most of them load torch."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        for module, names in _MODULES.items():
            if name in names:
                return getattr(import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
