"""Wrong scripts are named at their line, right ones are not accused."""

import pytest

from anybatch.doctor import KINDS
from tests.doctor.watched import ZOO, diagnose, planted

WRONG = sorted((ZOO / "wrong").glob("*.py"))
RIGHT = sorted((ZOO / "right").glob("*.py"))


@pytest.mark.parametrize("script", WRONG, ids=lambda path: path.stem)
def test_a_planted_mistake_is_named_at_its_line(script, tmp_path):
    done, diagnosis = diagnose(script, tmp_path)
    assert done.returncode == 0, done.stderr
    found = {(finding.kind, finding.line) for finding in diagnosis.findings}
    assert planted(script)
    assert planted(script) - found == set(), [finding.message for finding in diagnosis.findings]
    assert all(finding.kind != "recorder-trouble" for finding in diagnosis.findings)


@pytest.mark.parametrize("script", RIGHT, ids=lambda path: path.stem)
def test_a_right_script_has_no_errors(script, tmp_path):
    done, diagnosis = diagnose(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [finding.message for finding in diagnosis.findings if finding.severity == "error"] == []
    assert all(finding.kind != "recorder-trouble" for finding in diagnosis.findings)


def test_every_mark_in_the_zoo_is_a_kind():
    marks = {kind for script in WRONG for kind, _ in planted(script)}
    assert marks <= set(KINDS)
    assert len(marks) >= 20
