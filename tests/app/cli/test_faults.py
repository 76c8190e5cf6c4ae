"""What may go wrong around a run is said in a line, leaves the run in order, and never exits with 0."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from anybatch.app.cli.main import run
from anybatch.app.records.run_folder import RunFolder
from tests.app.cli.conftest import SMALL_TASK_FILE
from tests.processes.forked import command_line, run_anybatch, run_function, started

BROKEN = SMALL_TASK_FILE.replace("data = TensorDataset", "data = Broken")
CLASS = """

class Broken(TensorDataset):
    def __getitem__(self, row):
        self.asked = getattr(self, "asked", 0) + 1
        if self.asked > {after}:
            {act}
        return super().__getitem__(row)
"""
ENDS_EARLY = "raise StopIteration"


def broken_task(act, after=36):
    Path("mine.py").write_text(BROKEN + CLASS.format(act=act, after=after))
    return "mine.py"


def told_by(folder="out"):
    return RunFolder(Path(folder)).read_run()


# --- data that end early


def test_a_dataset_that_raises_stop_iteration_is_an_error_after_so_many_batches(capsys):
    assert run(["train", broken_task(ENDS_EARLY), "--out", "out"]) == 2
    assert "the training data ended after 2 of 3 batches" in capsys.readouterr().err
    assert (told_by().status, told_by().summary) == ("failed", {})


def test_validation_data_that_end_early_are_one_too(capsys):
    assert run(["train", broken_task(ENDS_EARLY, after=60), "--out", "out"]) == 2
    assert "the validation data ended after 0 of 1 batches" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["verify", "plan", "trace", "compare"])
def test_other_commands_say_it_of_their_first_batch(capsys, command):
    assert run([command, broken_task(ENDS_EARLY, after=1)]) == 2
    assert "the training data ended after 0 of" in capsys.readouterr().err


# --- a task that moved, or changed


def test_a_run_goes_on_with_the_task_file_where_it_is_now(task_file, capsys):
    assert run(["train", str(task_file), "--updates", "2", "--out", "out", "--save-every", "1"]) == 0
    record = json.loads(Path("out/run.json").read_text())
    Path("out/run.json").write_text(json.dumps(record | {"status": "running"}))
    task_file.rename("moved.py")
    assert run(["train", "--resume", "out"]) == 2
    assert (
        "mine.py, is not there any more. Say where it is now: anybatch train FILE --resume out"
        in capsys.readouterr().err
    )
    assert run(["train", "moved.py", "--resume", "out"]) == 0
    assert "the task is" in capsys.readouterr().out
    assert told_by().task == str(Path("moved.py").resolve())


def test_a_task_file_that_was_edited_and_another_torch_are_said_in_a_line(task_file, capsys):
    assert run(["train", str(task_file), "--updates", "2", "--out", "out", "--save-every", "1"]) == 0
    record = json.loads(Path("out/run.json").read_text())
    versions = record["versions"] | {"torch": "2.12.9"}
    Path("out/run.json").write_text(json.dumps(record | {"status": "running", "versions": versions}))
    task_file.write_text(task_file.read_text() + "# a word more\n")
    capsys.readouterr()
    assert run(["train", "--resume", "out"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("the task file has changed" in line for line in lines) == 1
    assert sum(" now, and was 2.12.9" in line for line in lines) == 1


# --- a run folder is somebody's code


def foreign(tmp_path, task_file):
    """A run folder that brings its task along."""
    assert run(["train", str(task_file), "--updates", "2", "--out", "out", "-q"]) == 0
    planted = Path("out/mine.py")
    planted.write_text("open('it ran', 'w').close()\n" + task_file.read_text())
    record = json.loads(Path("out/run.json").read_text())
    Path("out/run.json").write_text(json.dumps(record | {"status": "running", "task": str(planted.resolve())}))
    return planted


def test_a_file_inside_the_run_folder_is_named_and_not_run_unless_someone_agrees(tmp_path, task_file):
    planted = foreign(tmp_path, task_file)
    done = run_anybatch("train", "--resume", "out", cwd=tmp_path)
    assert done.returncode == 2
    assert f"its task is the file {planted.resolve()}" in done.stdout
    assert "lies inside the run folder" in done.stderr
    assert not Path("it ran").exists()
    assert run_anybatch("train", str(planted), "--resume", "out", cwd=tmp_path).returncode == 0
    assert Path("it ran").exists()


# --- one process at a time


def test_a_second_process_in_the_same_run_folder_is_refused_by_pid_and_deletes_nothing(tmp_path, task_file):
    task_file.write_text(
        "import signal, sys\n" + SMALL_TASK_FILE.replace("    inputs", "    signal.pause()\n    inputs", 1)
    )
    arguments = ("train", str(task_file), "--out", "out")
    with started(command_line, arguments, cwd=tmp_path) as first:
        while not Path("out/run.lock").is_file() or not Path("out/run.lock").read_text():
            time.sleep(0.01)
        second = run_anybatch(*arguments, cwd=tmp_path)
        assert second.returncode == 2
        assert f"out is in use by process {first.pid} on " in second.stderr
    assert run(["train", "textbook", "--updates", "1", "--out", "out", "-q"]) == 0  # killed: the lock has gone with it


# --- records that were damaged


def test_garbage_in_metrics_costs_its_own_lines_only(task_file, capsys):
    assert run(["train", str(task_file), "--updates", "6", "--out", "out", "--save-every", "6"]) == 0
    metrics = Path("out/metrics.jsonl")
    lines = metrics.read_bytes().splitlines(keepends=True)
    garbage = [
        b"\xff\xfe\n",
        b"[" * 100_000 + b"\n",
        b'{"update": 1' + b"0" * 400 + b"}\n",
        b'{"no": "event"}\n',
        b"\r\r\n",
    ]
    metrics.write_bytes(b"".join([*lines[:2], *garbage, *lines[2:]]))
    record = json.loads(Path("out/run.json").read_text())
    Path("out/run.json").write_text(json.dumps(record | {"status": "running"}))
    capsys.readouterr()
    assert run(["train", "--resume", "out"]) == 0
    assert "2 lines of out/metrics.jsonl could not be read, and are left out" in capsys.readouterr().out
    kept = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["update"] for line in kept if line.get("event") == "update"] == [1, 2, 3, 4, 5, 6]
    assert told_by().summary["rows_seen"] == 80


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xff", b"[1]", b"[" * 100_000])
def test_a_run_json_that_cannot_be_read_does_not_lose_the_run(task_file, content, capsys):
    assert run(["train", str(task_file), "--updates", "3", "--out", "out", "--save-every", "1", "-q"]) == 0
    Path("out/run.json").write_bytes(content)
    assert run(["train", "--resume", "out"]) == 0
    assert "going on after update 3" in capsys.readouterr().out
    assert told_by().status == "finished"


# --- disks


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_computed(capsys):
    Path("file").write_text("")
    for command in ("train", "compare", "trace", "verify", "plan"):
        assert run([command, "textbook", "--out", "file/out"]) == 2
        assert run([command, "textbook", "--out", "/proc/out"]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert all("nothing can be written to" in line for line in lines)
        assert len(lines) == 2


def limited(arguments):
    """No file may grow beyond 20 kB, as on a disk that is full."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    return command_line(arguments)


def test_a_disk_that_fills_up_is_one_line_and_what_was_computed_is_printed(tmp_path):
    for command, found in (("train", "epoch 1 "), ("verify", "exact: 64 rows"), ("trace", "stage by stage")):
        done = run_function(limited, (command, "textbook", "--out", command), cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert found in done.stdout
        assert done.stderr.startswith("anybatch: OSError: [Errno 27] File too large")
        assert done.stderr.count("\n") == 1


# --- ends that are none


@pytest.mark.parametrize("after", [0, 36])
def test_sys_exit_0_of_a_dataset_is_no_success(capsys, after):
    assert run(["train", broken_task("raise SystemExit(0)", after=after), "--out", "out"]) == 2
    assert "a task's own code called sys.exit(0)" in capsys.readouterr().err
    assert (told_by().status, told_by().reason) == ("failed", "the task's own code called sys.exit(0)")


@pytest.mark.parametrize("source", ["import sys\nsys.exit(0)\n", "import sys\n\ndef task():\n    sys.exit(0)\n"])
def test_nor_is_that_of_a_task_file(capsys, source):
    Path("mine.py").write_text(source)
    for command in ("train", "verify", "plan"):
        assert run([command, "mine.py"]) == 2
    assert capsys.readouterr().err.count("raised SystemExit") == 3


def test_an_error_of_the_tasks_own_fails_the_run_with_its_reason_a_page_and_a_short_traceback(capsys):
    assert run(["train", broken_task("raise KeyError('no such column')"), "--out", "out"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert [line for line in lines if "File" in line] == [
        line for line in lines if "mine.py" in line and "File" in line
    ]
    assert lines[-1] == "anybatch: the task's own code raised KeyError: 'no such column'"
    assert (told_by().status, told_by().reason) == ("failed", "KeyError: 'no such column'")
    assert "It failed at update 2 of 12: KeyError" in Path("out/report.html").read_text()


def waiting_for(text, folder):
    while text not in (folder / "stdout").read_text():
        time.sleep(0.01)


LONG = ("train", "mine.py", "--epochs", "100000", "--out", "out")


def test_a_terminal_that_is_closed_stops_the_run_after_its_update(tmp_path, task_file):
    with started(command_line, LONG, cwd=tmp_path) as process:
        waiting_for("epoch 2 ", process.folder)
        os.kill(process.pid, signal.SIGHUP)
        assert process.wait().returncode == 1
    assert told_by().status == "stopped"
    assert Path("out/report.html").is_file()


def interrupted_amid_an_update(arguments):
    from anybatch.app.training import loop

    ask = loop.Loop._learn

    def learn(self, batch):
        if self.progress.update == 5:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return ask(self, batch)

    loop.Loop._learn = learn
    return command_line(arguments)


def test_a_second_interrupt_leaves_a_run_that_is_stopped(tmp_path, task_file):
    done = run_function(interrupted_amid_an_update, LONG, cwd=tmp_path)
    assert done.returncode == 130
    assert (told_by().status, told_by().reason) == ("stopped", "it was interrupted a second time, amid an update")


def into_a_pipe_that_closes(arguments):
    import sys

    from anybatch.app.training import loop

    ours, theirs = os.pipe()
    os.dup2(theirs, 1)
    os.close(theirs)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    learn = loop.Loop._learn

    def closing(self, batch):
        if self.progress.update == 4:
            os.close(ours)
        return learn(self, batch)

    loop.Loop._learn = closing
    return command_line(arguments)


def test_a_reader_that_went_away_stops_the_run(tmp_path, task_file):
    done = run_function(into_a_pipe_that_closes, LONG, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert (told_by().status, told_by().reason) == ("stopped", "what it prints to was closed")
    assert "It was stopped at update 6" in Path("out/report.html").read_text()


def ignoring_interrupts(arguments):
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return command_line(arguments)


def test_where_interrupts_are_ignored_they_stay_so_and_terminating_still_stops(tmp_path, task_file):
    with started(ignoring_interrupts, LONG, cwd=tmp_path) as process:
        waiting_for("epoch 2 ", process.folder)
        os.kill(process.pid, signal.SIGINT)
        os.kill(process.pid, signal.SIGHUP)
        waiting_for(f"epoch {(process.folder / 'stdout').read_text().count('epoch') + 20} ", process.folder)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait().returncode == 1
    assert told_by().status == "stopped"


# --- numbers that are none


def test_a_validation_loss_of_nan_exits_with_1_and_best_is_that_of_other_epochs(capsys):
    source = SMALL_TASK_FILE.replace("    return Task(", "    model.register_forward_hook(spoil)\n    return Task(")
    source += "\n\nepoch = [0]\n\n\ndef spoil(model, inputs, output):\n"
    source += "    if not model.training:\n        epoch[0] += 1\n        return output * {factor}\n"
    Path("mine.py").write_text(source.format(factor="(float('nan') if epoch[0] == 1 else 1.0)"))
    assert run(["train", "mine.py", "--out", "first"]) == 0
    assert 0 <= told_by("first").summary["lowest_valid_loss"] < 100
    Path("mine.py").write_text(source.format(factor="float('nan')"))
    assert run(["train", "mine.py", "--out", "all"]) == 1
    assert "the validation loss is nan" in capsys.readouterr().out


def test_units_of_0_everywhere_are_said(capsys):
    source = SMALL_TASK_FILE.replace("nn.MSELoss()", "nn.CrossEntropyLoss()").replace(
        "nn.Linear(3, 1)", "nn.Linear(3, 2)"
    )
    Path("mine.py").write_text(source.replace("inputs.sum(1, keepdim=True)", "torch.full((40,), -100)"))
    run(["train", "mine.py", "--out", "out"])
    assert (
        capsys.readouterr().out.count("changed nothing: no update of it was applied. All its batches had 0 units") == 1
    )


def test_a_collate_that_drops_rows_is_said(capsys):
    collate = "collate=lambda rows: torch.utils.data.default_collate(rows[1:]),\n        "
    Path("mine.py").write_text(SMALL_TASK_FILE.replace("batch_size=16", collate + "batch_size=16"))
    assert run(["train", "mine.py", "--out", "out"]) == 0
    assert capsys.readouterr().out.count("the task's collate made 15 rows of 16") == 1


# --- arguments that are none


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "textbook", "--micro-batch", "4"], "No such option: --micro-batch"),
        (["train", "textbook", "--out", ""], "--out is empty"),
        (["train", "textbook", "--out="], "--out is empty"),
        (["train", "--resume", ""], "--resume is empty"),
        (["verify", ""], "an argument is empty"),
        (["train", "textbook", "--seed", str(2**64)], f"--seed {2**64}: expected a whole number, {2**64 - 1} at most"),
        (["train", "x" * 5000], "there is no task"),
        (["train", "x" * 5000 + ".py"], "there is no task file"),
        (["train", "textbook", "--out", "x" * 5000], "File name too long"),
        (["train", "--resume", "x" * 5000], "File name too long"),
        (["train", "textbook", "--device", "x" * 5000], "cannot be used"),
        (["train", "\udcff.py"], "there is no task file"),
    ],
)
def test_an_argument_that_is_none_gets_one_short_line(capsys, arguments, message):
    assert run(arguments) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert message in text
    assert len(text) < 700


def test_the_largest_seed_trains():
    assert run(["train", "textbook", "--seed", str(2**64 - 1), "--updates", "2", "--out", "out", "-q"]) == 0


def test_names_of_bytes_that_are_no_text_are_taken(tmp_path, task_file):
    name = os.fsdecode(b"\xff\xfe.py")
    task_file.rename(name)
    done = run_anybatch("train", name, "--updates", "2", "--out", "out", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert Path(told_by().task) == tmp_path / name
    assert run_anybatch("report", "out", cwd=tmp_path).returncode == 0
    done = run_anybatch("train", "textbook", "--out", os.fsdecode(b"\xff"), cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "is no UTF-8, and torch writes to no such name" in done.stderr
