"""`anybatch doctor`: run somebody's script, record its training loop, and report what is wrong with it."""

import json
import tempfile
from pathlib import Path

from anybatch import __version__
from anybatch.app.cli.screen import say
from anybatch.app.lessons.pages.see_lessons import lesson_of_finding, see
from anybatch.app.records.tolerant_reading import plain
from anybatch.display import did_you_mean
from anybatch.doctor import SEVERITIES, Diagnosis, Watch, as_github, as_sarif, describe, judge_folder, run_watched
from anybatch.errors import DoctorError


def doctor_command(
    words: list[str],
    *,
    updates: int,
    short_epochs: int,
    log: Path | None,
    page: Path | None,
    sarif: Path | None,
    fail_on: str,
    is_json: bool,
    is_github: bool,
    is_compiling: bool,
) -> int:
    """Run the script, or judge the logs of an earlier run. Return 1 for findings as bad as `fail_on` or a failed script."""
    if fail_on not in (*SEVERITIES, "never"):
        hint = did_you_mean(fail_on, (*SEVERITIES, "never")) or "."
        raise DoctorError(f"--fail-on is {fail_on!r}; it is one of {', '.join(SEVERITIES)}, never{hint}")
    if min(updates, short_epochs) < 0:
        raise DoctorError(
            f"--updates is {updates} and --short-epochs {short_epochs}; 0 is without end, and none is less."
        )
    if words and log is not None and log.exists() and any(log.iterdir()):
        raise DoctorError(
            f"the folder {log} of --log is not empty; name a new one, or leave the script out to judge its logs again."
        )
    is_quiet = is_json or is_github
    with tempfile.TemporaryDirectory(prefix="anybatch-doctor-") as name:
        folder, code = log or Path(name), 0
        if words:
            watch = Watch(folder=str(folder.resolve()), updates=updates, short_epochs=short_epochs)
            code = run_watched(words, watch, is_compiling=is_compiling, is_quiet=is_quiet)
        diagnosis = judge_folder(folder)
    if not diagnosis.loops:
        raise DoctorError(_nothing_seen(words, folder, code))
    _print(diagnosis, is_json=is_json, is_github=is_github)
    if sarif is not None:
        sarif.write_text(json.dumps(as_sarif(diagnosis, __version__), indent=1))
    if page is not None:
        from anybatch.app.report.doctor_page import write_doctor_page

        found = diagnosis.as_json()
        findings = [{**one, "lesson": lesson_of_finding(one["kind"])} for one in found["findings"]]
        write_doctor_page({**found, "findings": findings}, page)
        say(f"page: {page}", is_quiet=is_quiet)
    has_failed = code != 0 and any(loop.reason == "error" for loop in diagnosis.loops)
    return 1 if diagnosis.at_least(fail_on) or has_failed else 0


def _print(diagnosis: Diagnosis, *, is_json: bool, is_github: bool) -> None:
    if is_json:
        print(json.dumps(plain(diagnosis.as_json()), allow_nan=False, ensure_ascii=False))
    elif is_github:
        print(as_github(diagnosis))
    else:
        say(f"\nanybatch {__version__}  doctor\n\n{describe(diagnosis)}")
        for lesson in dict.fromkeys(lesson_of_finding(one.kind) for one in diagnosis.at_least("warning")):
            say(see(lesson))


def _nothing_seen(words: list[str], folder: Path, code: int) -> str:
    if not words:
        return f"there is no log of a training loop in {folder}; give a script, or the folder of an earlier --log."
    ended = f"ended with code {code} and" if code else "ended and"
    return f"{words[0]} {ended} no backward pass or step was seen; does it train with torch?"
