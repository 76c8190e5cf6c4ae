"""Starting to watch: a block of one's own code with `Doctor`, or somebody's script with `run_watched`."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from anybatch.doctor.finding import Finding
from anybatch.doctor.judging import Diagnosis, judge_folder
from anybatch.doctor.recording import Watch, begin_watching, end_watching
from anybatch.doctor.wording import describe
from anybatch.errors import DoctorError

STARTUP = Path(__file__).parent / "startup"


class Doctor:
    """Watches the training loops inside its block; after it, `findings` and `check()` say what is wrong.

    Nothing of the loop is changed: weights are bit for bit those without it. Models and optimizers must be made inside
    the block. One block at a time in a process.

        with Doctor() as doctor:
            train(model)
        doctor.check()
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="anybatch-doctor-")
        self._log: Any = None
        self._found: Diagnosis | None = None

    def __enter__(self) -> "Doctor":
        self._log = begin_watching(Watch(folder=self._folder.name, updates=0, short_epochs=0))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_watching(self._log, "error" if error is not None else "")
        self._found = judge_folder(Path(self._folder.name))
        self._folder.cleanup()

    @property
    def diagnosis(self) -> Diagnosis:
        """Everything that was seen and found."""
        if self._found is None:
            raise DoctorError("the block that the doctor watches has not ended; ask for the findings after it.")
        return self._found

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Errors first."""
        return self.diagnosis.findings

    def check(self, fail_on: str = "error") -> None:
        """Raise DoctorError, with the report, where something as bad or worse was found."""
        bad = self.diagnosis.at_least(fail_on)
        if bad:
            raise DoctorError(f"{len(bad)} findings in the training loop:\n\n{describe(self.diagnosis)}")


def run_watched(words: Sequence[str], watch: Watch, *, is_compiling: bool, is_quiet: bool) -> int:
    """Run a script or a command, and every process that it starts, under watch.

    It has our terminal, or stderr for all it says where stdout is to stay clean. torch.compile is off unless asked for,
    since it hides losses.

    Returns:
        The exit code of the script.
    """
    path = os.pathsep.join(filter(None, [str(STARTUP), os.environ.get("PYTHONPATH", "")]))
    compiling = {} if is_compiling else {"TORCHDYNAMO_DISABLE": "1"}
    environment = {**os.environ, **watch.as_environment(), **compiling, "PYTHONPATH": path}
    done = subprocess.run(_command(words), env=environment, stdout=sys.stderr if is_quiet else None, check=False)
    return done.returncode


def _command(words: Sequence[str]) -> list[str]:
    """`train.py --epochs 1` is run by this Python; anything else is a command of its own, such as torchrun."""
    first = words[0]
    is_script = first.endswith(".py")
    if not (Path(first).is_file() if is_script else shutil.which(first)):
        kind = "file" if is_script else "command"
        raise DoctorError(f"there is no {kind} {first}; anybatch doctor takes a Python script, or -- and a command.")
    return [sys.executable, *words] if is_script else list(words)
