"""Watch a block of one's own code with `Doctor`, or somebody's script with `run_watched`."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from anybatch.doctor.finding import Finding
from anybatch.doctor.judging import Diagnosis, judge_folder
from anybatch.doctor.recording import Watch, begin_watching, end_watching
from anybatch.doctor.wording import describe
from anybatch.errors import DoctorError

if TYPE_CHECKING:
    from anybatch.doctor.recording.event_log import EventLog

STARTUP = Path(__file__).parent / "startup"


class Doctor:
    """Context manager that watches the training loops inside its block and reports their mistakes.

    The loop is not changed: its weights are bit for bit those without the doctor. After the block, `findings` lists
    the problems and `check()` raises if there are errors. Models and optimizers must be made inside the block, and a
    process can have one block at a time. To watch a script that you do not want to edit, run `anybatch doctor train.py`.

    >>> import torch
    >>> with Doctor() as doctor:
    ...     weight = torch.nn.Parameter(torch.ones(2))
    ...     optimizer = torch.optim.SGD([weight], lr=0.1)
    ...     for i in range(8):
    ...         torch.nn.functional.mse_loss(weight * i, torch.zeros(2)).backward()  # should be divided by 4
    ...         if i % 4 == 3:
    ...             optimizer.step()
    ...             optimizer.zero_grad()
    >>> [finding.kind for finding in doctor.findings if finding.severity == "error"]
    ['not-divided']
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="anybatch-doctor-")
        self._log: EventLog
        self._diagnosis: Diagnosis | None = None

    def __enter__(self) -> "Doctor":
        self._log = begin_watching(Watch(folder=self._folder.name, updates=0, short_epochs=0))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        end_watching(self._log, "error" if error is not None else "")
        self._diagnosis = judge_folder(Path(self._folder.name))
        self._folder.cleanup()

    @property
    def diagnosis(self) -> Diagnosis:
        """The findings and the watched updates.

        Raises:
            DoctorError: If the block has not ended.
        """
        if self._diagnosis is None:
            raise DoctorError("the block that the doctor watches has not ended; ask for the findings after it.")
        return self._diagnosis

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The problems that were found, errors first."""
        return self.diagnosis.findings

    def check(self, fail_on: str = "error") -> None:
        """Raise if the loop has problems of some severity.

        Args:
            fail_on: The least severity that raises: "error", "warning" or "note".

        Raises:
            DoctorError: If there are such findings, with the report as its message, or if the block has not ended.
        """
        bad = self.diagnosis.at_least(fail_on)
        if bad:
            raise DoctorError(f"{len(bad)} findings in the training loop:\n\n{describe(self.diagnosis)}")


def run_watched(words: Sequence[str], watch: Watch, *, is_compiling: bool, is_quiet: bool) -> int:
    """Run a script or a command, and every process that it starts, under watch; return its exit code.

    `train.py --epochs 1` is run by this Python; anything else is a command, such as torchrun. Its stdout goes to stderr
    if `is_quiet`. torch.compile is off unless `is_compiling`, because it hides losses.
    """
    first, is_script = words[0], words[0].endswith(".py")
    if not (Path(first).is_file() if is_script else shutil.which(first)):
        kind = "file" if is_script else "command"
        raise DoctorError(f"there is no {kind} {first}; anybatch doctor takes a Python script, or -- and a command.")
    command = [sys.executable, *words] if is_script else list(words)
    path = os.pathsep.join(filter(None, [str(STARTUP), os.environ.get("PYTHONPATH", "")]))
    compiling = {} if is_compiling else {"TORCHDYNAMO_DISABLE": "1"}
    environment = {**os.environ, **watch.as_environment(), **compiling, "PYTHONPATH": path}
    return subprocess.run(command, env=environment, stdout=sys.stderr if is_quiet else None, check=False).returncode
