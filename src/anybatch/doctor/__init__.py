"""Watching somebody else's training loop: recorder, log, windows, rules, findings."""

from typing import TYPE_CHECKING

from anybatch.lazy import lazily

if TYPE_CHECKING:
    from anybatch.doctor.finding import KINDS, SEVERITIES, Finding
    from anybatch.doctor.judging import Diagnosis, judge_folder
    from anybatch.doctor.launching import run_watched
    from anybatch.doctor.recording import Watch
    from anybatch.doctor.watching import Doctor
    from anybatch.doctor.wording import as_github, as_sarif, describe
else:
    __getattr__ = lazily(__name__)

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
