"""`Doctor`: watching a block of one's own code, in a test for instance."""

import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from anybatch.doctor.finding import Finding
from anybatch.doctor.judging import Diagnosis, judge_folder
from anybatch.doctor.recording import Watch, begin_watching, end_watching
from anybatch.doctor.wording import describe
from anybatch.errors import DoctorError


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
        self._watched: Any = None
        self._found: Diagnosis | None = None

    def __enter__(self) -> "Doctor":
        self._watched = begin_watching(Watch(folder=self._folder.name, updates=0, short_epochs=0))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tape, patches = self._watched
        end_watching(tape, patches, "error" if error is not None else "")
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
