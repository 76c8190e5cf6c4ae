"""Every message points to a lesson: each class of error, each kind of cause, each kind of finding."""

import ast
from pathlib import Path

import pytest

import anybatch
from anybatch import errors
from anybatch.app.cli.main import run
from anybatch.app.lessons.pages.lesson_content import ORDER
from anybatch.app.lessons.pages.see_lessons import LESSON_OF_CAUSE, LESSON_OF_ERROR, LESSON_OF_FINDING, lesson_of_error
from anybatch.doctor import KINDS

SOURCE = Path(anybatch.__file__).parent


def classes_of_errors():
    return {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.AnybatchError) and value is not errors.AnybatchError
    }


def kinds_of_causes():
    """Every `kind=` that a `Cause` is made with, read from the source."""
    calls = [
        node
        for path in (SOURCE / "verification").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Cause"
    ]
    kinds = [word.value for call in calls for word in call.keywords if word.arg == "kind"]
    either = [part for kind in kinds for part in ((kind.body, kind.orelse) if isinstance(kind, ast.IfExp) else (kind,))]
    return {part.value for part in either}


def test_every_class_of_error_has_a_lesson():
    assert set(LESSON_OF_ERROR) == classes_of_errors()
    assert set(LESSON_OF_ERROR.values()) <= set(ORDER)


def test_every_kind_of_cause_has_a_lesson():
    assert len(kinds_of_causes()) > 10
    assert set(LESSON_OF_CAUSE) == kinds_of_causes()
    assert set(LESSON_OF_CAUSE.values()) <= set(ORDER)


def test_every_kind_of_finding_has_a_lesson():
    assert set(LESSON_OF_FINDING) == set(KINDS)
    assert set(LESSON_OF_FINDING.values()) <= set(ORDER)


def test_an_error_below_a_known_class_has_its_lesson():
    class NarrowerError(errors.UnitsError): ...

    assert lesson_of_error(NarrowerError("0 tokens")) == "units"


def test_the_command_line_ends_an_error_with_its_lesson(capsys):
    assert run(["learn", "unit"]) == 2
    told = capsys.readouterr().err
    assert "there is no lesson 'unit'" in told
    assert told.endswith("see: anybatch learn trace\n")


@pytest.mark.parametrize("arguments", [["learn", "units", "--out"], ["learn", "--site"]])
def test_learn_writes_where_it_is_told_and_opens_nothing(tmp_path, capsys, monkeypatch, arguments):
    monkeypatch.setattr("webbrowser.open", lambda address: pytest.fail(f"opened {address}"))
    assert run([*arguments, str(tmp_path / "there")]) == 0
    told = capsys.readouterr().out
    assert "there" in told
    assert (tmp_path / "there").exists()


def test_learn_opens_the_page_where_nobody_said_where(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr("webbrowser.open", seen.append)
    assert run(["learn"]) == 0
    assert len(seen) == 1
    assert seen[0].startswith("file:")


def test_learn_refuses_a_site_of_one_page(tmp_path, capsys):
    assert run(["learn", "units", "--site", str(tmp_path)]) == 2
    assert "does not go with units" in capsys.readouterr().err
