"""`anybatch doctor`: run somebody's script under watch, and say what is wrong with its loop."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from anybatch import __version__
from anybatch.app.cli.screen import say
from anybatch.app.lessons.pages.see_lessons import lesson_of_finding, see
from anybatch.app.records.tolerant_reading import plain
from anybatch.display import did_you_mean
from anybatch.doctor import SEVERITIES, Diagnosis, as_github, as_sarif, describe, judge_folder, run_watched
from anybatch.errors import DoctorError


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorRequest:
    """The command line."""

    words: tuple[str, ...]
    updates: int
    short_epochs: int
    log: Path | None
    page: Path | None
    sarif: Path | None
    fail_on: str
    is_json: bool
    is_github: bool
    is_compiling: bool


def doctor_command(request: DoctorRequest) -> int:
    """0 clean, 1 findings as bad as `--fail-on`, or a script that failed; 2 usage."""
    if request.fail_on not in (*SEVERITIES, "never"):
        hint = did_you_mean(request.fail_on, (*SEVERITIES, "never")) or "."
        raise DoctorError(f"--fail-on is {request.fail_on!r}; it is one of {', '.join(SEVERITIES)}, never{hint}")
    if min(request.updates, request.short_epochs) < 0:
        raise DoctorError(
            f"--updates is {request.updates} and --short-epochs {request.short_epochs}; 0 is without end, and none is less."
        )
    with tempfile.TemporaryDirectory(prefix="anybatch-doctor-") as name:
        folder = request.log or Path(name)
        code = _run(request, folder) if request.words else 0
        diagnosis = judge_folder(folder)
        if not diagnosis.loops:
            raise DoctorError(_nothing_seen(request, folder, code))
        return _tell(request, diagnosis, code)


def _run(request: DoctorRequest, folder: Path) -> int:
    from anybatch.doctor import Watch

    if request.log is not None and folder.exists() and any(folder.iterdir()):
        raise DoctorError(
            f"the folder {folder} of --log is not empty; name a new one, or leave the script out to judge its logs again."
        )
    watch = Watch(folder=str(folder.resolve()), updates=request.updates, short_epochs=request.short_epochs)
    return run_watched(
        request.words, watch, is_compiling=request.is_compiling, is_quiet=request.is_json or request.is_github
    )


def _nothing_seen(request: DoctorRequest, folder: Path, code: int) -> str:
    if not request.words:
        return f"there is no log of a training loop in {folder}; give a script, or the folder of an earlier --log."
    ended = f"ended with code {code} and" if code else "ended and"
    return f"{request.words[0]} {ended} no backward pass or step was seen; does it train with torch?"


def _tell(request: DoctorRequest, diagnosis: Diagnosis, code: int) -> int:
    if request.is_json:
        print(json.dumps(plain(diagnosis.as_json()), allow_nan=False, ensure_ascii=False))
    elif request.is_github:
        print(as_github(diagnosis))
    else:
        say(f"\nanybatch {__version__}  doctor\n\n{describe(diagnosis)}")
        for lesson in dict.fromkeys(lesson_of_finding(one.kind) for one in diagnosis.at_least("warning")):
            say(see(lesson))
    if request.sarif is not None:
        request.sarif.write_text(json.dumps(as_sarif(diagnosis, __version__), indent=1))
    if request.page is not None:
        from anybatch.app.report.doctor_page import write_doctor_page

        told = diagnosis.as_json()
        findings = [{**one, "lesson": lesson_of_finding(one["kind"])} for one in told["findings"]]
        write_doctor_page({**told, "findings": findings}, request.page)
        say(f"page: {request.page}", is_quiet=request.is_json or request.is_github)
    has_failed = code != 0 and any(loop.reason == "error" for loop in diagnosis.loops)
    return 1 if diagnosis.at_least(request.fail_on) or has_failed else 0
