import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from anybatch.app.cli.main import run
from anybatch.app.training.launch import find_launch
from benchmarks import kill_ranks
from benchmarks.kill_resume import content_of
from tests.processes.forked import main_module, started
from tests.processes.torchrun import launched

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


def weights(folder):
    tensors = content_of(folder / "checkpoints")["tensors"]
    return torch.cat([value.flatten() for name, value in tensors.items() if name.startswith("model.")])


def test_two_ranks_print_once_stop_together_and_go_on_in_one_process_to_the_same_end(tmp_path, task_file, capsys):
    options = ["--standalone", "--nproc-per-node", "2", "-m", "anybatch"]
    options += ["train", str(task_file), "--epochs", "200", "--save-every", "50", "--out", "out"]
    out = tmp_path / "out"
    with started(main_module, "torch.distributed.run", options, cwd=tmp_path, env=ENVIRONMENT) as agent:
        while not list(out.glob("checkpoints/update-*")):
            assert agent.process.is_alive()
            time.sleep(0.01)
        # a wish on one rank stops both, after the same update
        os.kill(kill_ranks.workers_of(agent.pid)[1], signal.SIGTERM)
        done = agent.wait()
    assert done.returncode == 1
    text = done.stdout
    assert text.count("training mine") == text.count("stopped after update") == 1
    assert "on cpu, fp32, 2 ranks (ddp)" in text
    record = json.loads((out / "run.json").read_text())
    assert (record["status"], record["plan"]["ranks"], record["plan"]["parallel"]) == ("stopped", 2, "ddp")
    assert len(content_of(out / "checkpoints")["random"]) == 2

    assert run(["train", "--resume", "out"]) == 0
    assert "going on after update" in capsys.readouterr().out
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if line["event"] == "update"]
    assert [line["update"] for line in updates] == list(range(1, 601))
    assert [line["rows"] for line in updates[:3]] == [16, 16, 8]
    assert run(["train", str(task_file), "--epochs", "200", "--save-every", "1000", "--out", "straight", "-q"]) == 0
    assert torch.allclose(weights(out), weights(tmp_path / "straight"), rtol=1e-5, atol=1e-6)


class WarmTorchrun:
    """The agent of torchrun with ranks that are forked."""

    seconds_to_start = 0.3

    def __init__(self, arguments, log, ranks, restarts):
        log.touch()
        self.folder = log.with_suffix(".processes")
        self.folder.mkdir()
        self.agent = launched(
            command_line_on_rank, arguments, self.folder, name=log.stem, ranks=ranks, restarts=restarts
        )

    def poll(self):
        return self.wait() if self.agent.done() else None

    def wait(self):
        self.agent.result()  # raises where a rank has failed for good
        return 0

    def processes(self):
        found = {}
        for file in self.folder.iterdir():
            pid, rank = map(int, file.name.split("-"))
            if Path(f"/proc/{pid}").exists():
                found[rank] = pid
        return found


def command_line_on_rank(arguments, folder):
    (folder / f"{os.getpid()}-{os.environ['RANK']}").touch()
    if code := run(list(arguments)):
        sys.exit(code)


def test_ranks_killed_under_torchrun_go_on_by_themselves_to_the_same_end_bit_for_bit(capsys):
    assert kill_ranks.main(["--kills", "1", "--options", "--epochs 6 --save-every 3"], WarmTorchrun) == 0
    assert "1 kills, its end is equal bit for bit" in capsys.readouterr().out


@pytest.fixture
def as_rank(monkeypatch):
    def become(rank):
        for name, value in {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "TORCHELASTIC_RUN_ID": "job"}.items():
            monkeypatch.setenv(name, str(value))

    return become


@pytest.mark.parametrize(
    "arguments", [["compare", "textbook"], ["trace", "textbook"], ["report", "out"]], ids=lambda words: words[0]
)
def test_what_is_for_one_process_is_refused_by_rank_0_and_by_the_others_in_silence(as_rank, capsys, arguments):
    as_rank(0)
    assert run(arguments) == 2
    expected = f"anybatch: anybatch {arguments[0]} works in one process, and torchrun has started 2. Start it without"
    assert capsys.readouterr().err.startswith(expected)
    as_rank(1)
    assert run(arguments) == 2
    assert capsys.readouterr().err == ""


def test_an_error_of_another_rank_says_whose_it_is(as_rank, capsys):
    as_rank(1)
    assert run(["train", "textbook", "--lr", "-1"]) == 2
    assert capsys.readouterr().err.startswith("anybatch, rank 1: --lr -1.0")


def test_a_restarted_launch_finds_its_run_and_another_does_not(tmp_path, task_file, as_rank):
    from anybatch.app.cli.train import TrainRequest, open_run
    from anybatch.app.training.settings import Settings

    def opened(out):
        request = TrainRequest(
            task=str(task_file),
            settings=Settings(),
            given=frozenset(),
            out=out,
            resume=None,
            tensorboard=False,
            is_quiet=True,
        )
        return open_run(request, find_launch())

    as_rank(0)
    for out in (Path("out"), None):
        first = opened(out)
        assert not first.goes_on
        first.folder.write(first.run)
        again = opened(out)
        assert again.goes_on
        assert again.folder == first.folder
    os.environ["TORCHELASTIC_RUN_ID"] = "another job"
    assert not opened(None).goes_on
