import json
import signal
import subprocess
import sys
import time

import pytest
import torch

from benchmarks.kill_resume import content_of
from tests.processes.forked import run_anybatch, run_module
from tests.processes.server import ALONE, ROOT


@pytest.mark.parametrize(
    ("task", "options"),
    [("textbook", "--epochs 4 --save-every 3"), ("digits", "--epochs 1 --save-every 2 --batch-size 32")],
)
def test_killed_at_random_moments_and_resumed_it_ends_bit_for_bit_the_same(task, options):
    # twice here; `python -m benchmarks.kill_resume --kills 100` kills as often as one likes
    done = run_module("benchmarks.kill_resume", "--task", task, "--kills", "2", "--options", options, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kills" in done.stdout
    assert "0 ended differently" in done.stdout


def test_a_process_killed_in_training_leaves_a_run_that_goes_on_to_the_same_end(tmp_path, monkeypatch):
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    options = ["train", "textbook", "--epochs", "20", "--save-every", "7", "-q", "--out"]
    process = subprocess.Popen([sys.executable, "-m", "anybatch", *options, "out"], cwd=tmp_path)  # a true cold start
    checkpoints = tmp_path / "out" / "checkpoints"
    while not checkpoints.is_dir() or len(list(checkpoints.glob("update-*"))) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert json.loads((tmp_path / "out" / "run.json").read_text())["status"] == "running"
    for arguments in (["train", "--resume", "out", "-q"], [*options, "straight"]):
        done = run_anybatch(*arguments, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
    killed, straight = (content_of(tmp_path / name / "checkpoints") for name in ("out", "straight"))
    assert killed["name"] == straight["name"] == "update-00000320"
    for name, value in straight["tensors"].items():
        assert torch.equal(value, killed["tensors"][name])
