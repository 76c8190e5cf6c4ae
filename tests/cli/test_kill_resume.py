import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from anybatch.training.checkpoints.saving import read

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill_resume.py"
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("task", "options"), [("textbook", "--save-every 3"), ("digits", "--epochs 2 --save-every 2 --batch-size 32")]
)
def test_killed_at_five_random_moments_and_resumed_it_ends_bit_for_bit_the_same(task, options):
    command = [sys.executable, str(SCRIPT), "--task", task, "--kills", "5", "--options", options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=ONE_THREAD)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 kills" in done.stdout
    assert "0 ended differently" in done.stdout


def test_a_process_killed_in_training_leaves_a_run_that_goes_on_to_the_same_end(tmp_path):
    command = [sys.executable, "-m", "anybatch", "train", "textbook", "--epochs", "20", "--save-every", "7", "-q"]
    process = subprocess.Popen([*command, "--out", "out"], cwd=tmp_path, env=ONE_THREAD)
    checkpoints = tmp_path / "out" / "checkpoints"
    end = time.monotonic() + 100
    while not checkpoints.is_dir() or len(list(checkpoints.glob("update-*"))) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert json.loads((tmp_path / "out" / "run.json").read_text())["status"] == "running"
    subprocess.run([*command[:4], "--resume", "out", "-q"], cwd=tmp_path, env=ONE_THREAD, check=True)
    subprocess.run([*command, "--out", "straight"], cwd=tmp_path, env=ONE_THREAD, check=True)
    killed, straight = (read(tmp_path / name / "checkpoints") for name in ("out", "straight"))
    assert killed is not None
    assert straight is not None
    assert killed[0].number == straight[0].number == 320
    for name, value in straight[1]["model"].items():
        assert torch.equal(value, killed[1]["model"][name])
