"""Watch somebody else's training loop and report its mistakes.

recording -> log -> loops and updates -> judging and rules -> findings -> wording; only the recorder loads torch.
"""

from anybatch.doctor.finding import KINDS, SEVERITIES, Finding
from anybatch.doctor.judging import Diagnosis, judge_folder
from anybatch.doctor.recording import Watch
from anybatch.doctor.watching import Doctor, run_watched
from anybatch.doctor.wording import as_github, as_sarif, describe
