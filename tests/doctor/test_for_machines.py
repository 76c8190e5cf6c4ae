"""What other programs take from the doctor: SARIF, annotations, exit codes, a fixture; and strings that are meant to harm."""

import json
import math
import re
from pathlib import Path

import pytest

from anybatch.app.report.doctor_page import render_doctor
from anybatch.doctor import describe
from anybatch.doctor.finding import SEVERITIES
from anybatch.doctor.judging import judge
from anybatch.doctor.wording import as_github, as_sarif
from tests.doctor.test_judging import CLEARED, PLACE, _log, _pass, _step, _windows
from tests.doctor.watched import ZOO
from tests.processes.forked import run_anybatch, run_function

WRONG = ZOO / "wrong" / "zero_too_early.py"
HARM = "a\x1b[31m b%\n::error::,<script>alert('x')</script>&.py"


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("log")
    lines = _windows([[1.0] * 4] * 2, loss=math.nan).events
    (folder / "0-1.doctor.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return folder


@pytest.mark.parametrize(("fail_on", "code"), [("error", 1), ("warning", 1), ("note", 1), ("never", 0)])
def test_the_exit_code_follows_fail_on(fail_on, code, log):
    assert run_anybatch("doctor", "--log", str(log), "--fail-on", fail_on).returncode == code


def test_a_log_without_errors_fails_on_notes_alone(tmp_path: Path):
    lines = _windows([[0.25] * 4] * 2).events
    (tmp_path / "0-1.doctor.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    codes = {
        level: run_anybatch("doctor", "--log", str(tmp_path), "--fail-on", level).returncode for level in SEVERITIES
    }
    assert codes == {"error": 0, "warning": 0, "note": 1}


def test_a_loss_that_is_nan_is_null_in_json(log):
    told = json.loads(run_anybatch("doctor", "--json", "--log", str(log)).stdout, parse_constant=pytest.fail)
    assert told["updates"][0]["micro_batches"][0]["loss"] is None


def test_static_hints_are_gone_and_a_run_is_named_instead():
    done = run_anybatch("doctor", "--static", "--github", str(WRONG))
    assert done.returncode == 2
    assert "--static is gone" in done.stderr
    assert "runs the script for 20 updates" in done.stderr


def test_sarif_has_what_its_schema_requires():
    """As the 2.1.0 schema of OASIS has it: `required`, enumerations, least values, and references that are URIs."""
    place = {**PLACE, "file": "/a b/träin%.py"}
    sarif = as_sarif(judge([_windows([[1.0] * 4] * 2, place=place)]), "1.0")
    assert set(sarif) == {"$schema", "version", "runs"}
    assert sarif["version"] == "2.1.0"
    (run,) = sarif["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"]
    rules = [rule["id"] for rule in driver["rules"]]
    assert len(rules) == len(set(rules))
    assert run["results"]
    for result in run["results"]:
        assert result["message"]["text"]
        assert result["level"] in ("none", "note", "warning", "error")
        assert result["ruleId"] in rules
        (location,) = result["locations"]
        physical = location["physicalLocation"]
        assert physical["region"]["startLine"] >= 1
    uris = {result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for result in run["results"]}
    assert "/a%20b/tr%C3%A4in%25.py" in uris


def test_names_that_would_steer_a_terminal_an_action_or_a_page_are_shown_and_do_nothing():
    place = {**PLACE, "file": HARM}
    kept = {"event": "kept", "variable": HARM, "alive": 7, "place": place}
    events = [_pass(serial, 1.0, place=place) for serial in range(2)]
    diagnosis = judge([_log(*events, kept, {**_step(), "place": place}, CLEARED)])
    assert any(HARM in finding.message for finding in diagnosis.findings)
    assert "\x1b" not in describe(diagnosis)
    assert all(
        line.startswith(("::error file=", "::warning file=", "::notice file="))
        for line in as_github(diagnosis).splitlines()
    )
    page = render_doctor(diagnosis.as_json())
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "script" not in as_sarif(diagnosis, "1")["$schema"]


TESTS = """
pytest_plugins = ["anybatch.doctor.doctor_fixture"]
import torch


def train(share):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for i in range(8):
        (torch.nn.functional.mse_loss(weight * (i + 1), torch.zeros(2)) * share).backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


def test_right(doctor):
    train(0.25)


def test_wrong(doctor):
    train(1.0)
"""


def run_pytest(folder: str) -> int:
    return int(pytest.main(["-q", "-p", "no:cacheprovider", "-rA", "--rootdir", folder, f"{folder}/test_loops.py"]))


def test_the_fixture_fails_the_test_of_a_wrong_loop_and_no_other(tmp_path):
    (tmp_path / "test_loops.py").write_text(TESTS)
    done = run_function(run_pytest, str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"^ERROR .*test_loops\.py::test_wrong\b", done.stdout, re.MULTILINE)
    assert "2 passed, 1 error" in done.stdout
    assert "the loss is not divided" in done.stdout
