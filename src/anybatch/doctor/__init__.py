"""Watching somebody else's training loop: recorder, log, loops, rules, findings. Only the recorder loads torch."""

from anybatch.doctor.finding import KINDS, SEVERITIES, Finding
from anybatch.doctor.judging import Diagnosis, judge_folder
from anybatch.doctor.recording import Watch
from anybatch.doctor.watching import Doctor, run_watched
from anybatch.doctor.wording import as_github, as_sarif, describe
