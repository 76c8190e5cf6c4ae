"""`anybatch doctor`: a script, unmodified, in a process of its own."""

import json
from pathlib import Path

import pytest

from anybatch import Doctor, DoctorError
from anybatch.app.report.doctor_page import write_doctor_page
from tests.doctor.watched import ZOO, diagnose
from tests.processes.forked import run_anybatch

WRONG = ZOO / "wrong" / "forgotten_division.py"


def test_json_is_one_object_and_the_exit_code_says_that_there_are_errors(tmp_path: Path):
    log = tmp_path / "log"
    done = run_anybatch("doctor", "--json", "--log", str(log), "--updates", "2", str(WRONG), cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert {finding["kind"] for finding in told["findings"] if finding["severity"] == "error"} == {"not-divided"}
    assert len(told["updates"]) == 2
    assert told["ended"] == ["updates"]
    again = run_anybatch("doctor", "--log", str(log), "--fail-on", "never", cwd=tmp_path)
    assert again.returncode == 0
    assert "not-divided" in again.stdout


def test_a_script_that_fails_has_its_own_traceback_and_what_was_seen_until_then(tmp_path: Path):
    script = tmp_path / "fails.py"
    script.write_text(WRONG.read_text() + "\nraise ValueError('my own')\n")
    done = run_anybatch("doctor", str(script), cwd=tmp_path)
    assert done.returncode == 1
    assert "ValueError: my own" in done.stderr
    assert "The script failed: 48 backward passes and 12 updates seen" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["doctor"], "name a script"),
        (["doctor", "none.py"], "there is no file none.py"),
        (["doctor", "--fail-on", "never!", "a.py"], "'never!'"),
        (["doctor", "--log", "empty"], "no log of a training loop"),
        (["doctor", "--", "no-such-command"], "there is no command no-such-command"),
    ],
)
def test_what_cannot_be_watched_is_a_usage_error(arguments, told, tmp_path: Path):
    done = run_anybatch(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert told in done.stderr


def test_children_that_are_spawned_are_watched(tmp_path: Path):
    script = tmp_path / "spawns.py"
    body = "\n".join(f"    {line}" for line in WRONG.read_text().splitlines()[2:])
    start = "    import torch.multiprocessing as mp\n    mp.spawn(learn, nprocs=1)"
    script.write_text(f"def learn(rank):\n{body}\n\nif __name__ == '__main__':\n{start}\n")
    done = run_anybatch("doctor", "--json", str(script), cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "not-divided" in {finding["kind"] for finding in json.loads(done.stdout)["findings"]}


def test_the_page_escapes_what_a_script_brings(tmp_path: Path):
    _, diagnosis = diagnose(WRONG, tmp_path / "log")
    told = diagnosis.as_json()
    told["findings"][0]["message"] = "<script>alert(1)</script>"
    told["timeline"][0]["what"] = '"><script>'
    page = write_doctor_page(told, tmp_path / "page.html").read_text()
    assert "<script>" not in page
    assert "counted 4 times" in page


def test_a_block_is_watched_and_checked_and_torch_is_as_it_was_after_it():
    import torch

    before = (torch.autograd.backward, torch.optim.Optimizer.zero_grad, torch.utils.data.DataLoader.__iter__)
    weight = torch.nn.Parameter(torch.ones(2))
    with Doctor() as doctor:
        with pytest.raises(DoctorError, match="has not ended"):
            _ = doctor.findings
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for i in range(8):
            torch.nn.functional.mse_loss(weight * (i + 1), torch.zeros(2)).backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    with pytest.raises(DoctorError, match="the loss is not divided"):
        doctor.check()
    after = (torch.autograd.backward, torch.optim.Optimizer.zero_grad, torch.utils.data.DataLoader.__iter__)
    assert before == after
