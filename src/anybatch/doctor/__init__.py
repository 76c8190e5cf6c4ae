"""Watching somebody else's training loop: recorder, log, windows, rules, findings."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anybatch.doctor.finding import KINDS, SEVERITIES, Finding
    from anybatch.doctor.judging import Diagnosis, judge_folder
    from anybatch.doctor.launching import run_watched
    from anybatch.doctor.recording import Watch
    from anybatch.doctor.watching import Doctor
    from anybatch.doctor.wording import as_github, as_sarif, describe

__all__ = [
    "Diagnosis",
    "Doctor",
    "Finding",
    "KINDS",
    "SEVERITIES",
    "Watch",
    "as_github",
    "as_sarif",
    "describe",
    "judge_folder",
    "run_watched",
]
_MODULES = {
    "finding": (
        "KINDS",
        "SEVERITIES",
        "Finding",
    ),
    "judging": (
        "Diagnosis",
        "judge_folder",
    ),
    "launching": ("run_watched",),
    "recording": ("Watch",),
    "watching": ("Doctor",),
    "wording": (
        "as_github",
        "as_sarif",
        "describe",
    ),
}
"""The names of each module, which is loaded when one of them is first asked for: most of them load torch."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        for module, names in _MODULES.items():
            if name in names:
                return getattr(import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
