import json
import os
import shutil
import signal
import sys
import threading
import time

import pytest

from anybatch.app.cli.main import run
from anybatch.app.records.run_folder import RunFolder


def lines_of(folder, event):
    return [line for line in RunFolder(folder).read_metrics() if line["event"] == event]


def test_textbook_reaches_97_percent_in_10_epochs_with_the_linear_rule(tmp_path, capsys):
    assert run(["train", "textbook", "--lr-rule", "linear", "--out", "out"]) == 0
    text = capsys.readouterr().out
    assert "lr      first 0.4, peak 0.4, ends at 0.4  (linear rule, 16 -> 64 rows)" in text
    summary = RunFolder(tmp_path / "out").read_run().summary
    assert summary["epochs"] == 10
    assert summary["accuracy"] >= 0.97
    assert summary["rows_seen"] == 10_000


def test_digits_reaches_97_percent(tmp_path, capsys):
    assert run(["train", "digits", "--epochs", "4", "--out", "out", "--quiet"]) == 0
    assert RunFolder(tmp_path / "out").read_run().summary["accuracy"] >= 0.97
    assert capsys.readouterr().out == ""


def test_a_micro_batch_chosen_by_itself_is_said_with_the_reason(tmp_path, capsys):
    assert run(["train", "textbook", "--micro-batch", "auto", "--updates", "20", "--out", "out"]) == 0
    text = capsys.readouterr().out
    assert "64 rows cut by Fit(fastest=True)" in text
    assert "micro-batch: " in text
    assert "rows per micro-batch" in text.split("micro-batch: ")[1]


def test_rows_of_the_standard_library_are_cut_by_tokens(tmp_path, capsys):
    assert run(["train", "stdlib", "--batch-size", "128", "--updates", "1", "--out", "out"]) == 0
    assert "128 rows cut by Tokens(2048)" in capsys.readouterr().out
    (update,) = lines_of(tmp_path / "out", "update")
    assert update["micro_batches"] > 5


def test_a_run_leaves_its_settings_metrics_checkpoints_and_page(tmp_path, task_file, capsys):
    assert run(["train", str(task_file), "--out", "out", "--lr", "0.05", "--batch-size", "12", "--keep", "2"]) == 0
    out = tmp_path / "out"
    found = json.loads((out / "run.json").read_text())
    assert (found["kind"], found["status"], found["task"]) == ("train", "finished", str(task_file))
    assert (found["settings"]["lr"], found["settings"]["batch_size"], found["seed"]) == (0.05, 12, 0)
    assert found["plan"] | {"rows": 40, "batch": 12, "micro_batch": 4, "updates": 16, "lr_last": 0.05} == found["plan"]
    assert found["versions"].keys() >= {"python", "torch"}
    assert [line["rows"] for line in lines_of(out, "update")] == [12, 12, 12, 4] * 4
    assert [line["epoch"] for line in lines_of(out, "epoch")] == [1, 2, 3, 4]
    assert len(lines_of(out, "window")) == len(lines_of(out, "memory")) == 1
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["update-00000012", "update-00000016"]
    assert (out / "report.html").stat().st_size > 1000
    assert "page: out/report.html" in capsys.readouterr().out


def test_without_out_a_run_goes_to_a_folder_of_its_own(tmp_path, task_file, capsys):
    for _ in range(2):
        assert run(["train", str(task_file), "--updates", "1"]) == 0
    folders = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert len(folders) == 2
    assert all(name.startswith("mine-2") for name in folders)


def test_plain_output_is_a_plan_and_a_line_per_epoch(task_file, capsys):
    run(["train", str(task_file), "--out", "out"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("anybatch ")
    assert "batch   16 rows in 4 micro-batches of up to 4, the last of each epoch 8 rows" in lines
    assert sum(line.startswith("epoch ") for line in lines) == 4
    assert lines[-2].startswith("done: updates 12")
    assert not any("\x1b" in line for line in lines)


def test_a_terminal_gets_a_bar(task_file, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    assert run(["train", str(task_file), "--out", "out"]) == 0
    text = capsys.readouterr().out
    assert "12/12" in text
    assert "epoch 4" in text


def interrupt_after(folder, updates, number):
    """Send this process a signal when the run in `folder` has done so many updates."""

    def wait():
        while (
            not folder.is_dir() or sum(line["event"] == "update" for line in RunFolder(folder).read_metrics()) < updates
        ):
            time.sleep(0.005)
        os.kill(os.getpid(), number)

    threading.Thread(target=wait, daemon=True).start()


@pytest.fixture(scope="module")
def straight_losses(tmp_path_factory):
    """Of the 192 updates of 12 epochs that nobody interrupts."""
    folder = tmp_path_factory.mktemp("straight")
    assert run(["train", "textbook", "--epochs", "12", "--out", str(folder / "out"), "-q"]) == 0
    return [line["loss"] for line in lines_of(folder / "out", "update")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_says_how_to_go_on_and_that_works(tmp_path, capsys, straight_losses, number):
    before = signal.getsignal(number)
    interrupt_after(tmp_path / "out", 10, number)
    assert run(["train", "textbook", "--epochs", "12", "--out", "out"]) == 1
    assert signal.getsignal(number) is before
    text = capsys.readouterr().out
    assert "go on with: anybatch train --resume out" in text
    stopped = RunFolder(tmp_path / "out").read_run()
    assert stopped.status == "stopped"
    done = stopped.summary["updates"]
    assert 10 <= done < 192
    assert run(["train", "--resume", "out"]) == 0
    assert f"going on after update {done}" in capsys.readouterr().out
    updates = lines_of(tmp_path / "out", "update")
    assert [line["update"] for line in updates] == list(range(1, 193))
    assert [line["loss"] for line in updates] == straight_losses


def test_a_finished_run_has_nothing_left_to_do(task_file, capsys):
    run(["train", str(task_file), "--out", "out", "-q"])
    assert run(["train", "--resume", "out"]) == 0
    assert "out is finished: nothing is left to do." in capsys.readouterr().out


def test_a_damaged_newest_checkpoint_is_said_and_passed_over(tmp_path, task_file, capsys):
    run(["train", str(task_file), "--out", "out", "-q"])
    folder = RunFolder(tmp_path / "out")
    newest = tmp_path / "out" / "checkpoints" / "update-00000012" / "__0_0.distcp"
    newest.write_bytes(newest.read_bytes()[:500])
    record = json.loads((folder.path / "run.json").read_text())
    (folder.path / "run.json").write_text(json.dumps(record | {"status": "running"}))
    assert run(["train", "--resume", "out"]) == 0
    text = capsys.readouterr().out
    assert "passed over: out/checkpoints/update-00000012 is damaged: __0_0.distcp has 500 bytes" in text
    assert "going on after update 9" in text
    assert [line["update"] for line in lines_of(folder.path, "update")] == list(range(1, 13))


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path, task_file, capsys):
    run(["train", str(task_file), "--out", "out", "-q"])
    for checkpoint in (tmp_path / "out" / "checkpoints").iterdir():
        shutil.rmtree(checkpoint)
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    (tmp_path / "out" / "run.json").write_text(json.dumps(record | {"status": "running"}))
    assert run(["train", "--resume", "out"]) == 0
    assert "starting from the first update" in capsys.readouterr().out
    assert len(lines_of(tmp_path / "out", "update")) == 12


def test_tensorboard_files_hold_every_update(tmp_path, task_file):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert run(["train", str(task_file), "--out", "out", "--tensorboard", "-q"]) == 0
    events = EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("update/loss")] == list(range(1, 13))


def test_a_loss_that_is_not_finite_stops_with_code_1_and_names_the_parameter(tmp_path, task_file, capsys):
    task_file.write_text(task_file.read_text().replace("lr=0.1", "lr=1e30"))
    assert run(["train", str(task_file), "--out", "out", "-q"]) == 1
    message = capsys.readouterr().err
    assert "not finite" in message
    assert message.count("\n") == 1
    assert RunFolder(tmp_path / "out").read_run().status == "stopped"
