import json
import os
import subprocess
import sys

import pytest

from anybatch.app.cli.main import run


def failure(capsys, *arguments):
    """The one line that bad input gets."""
    assert run(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("anybatch: ")
    return captured.err


@pytest.mark.parametrize("command", ["train", "compare", "trace", "verify"])
def test_an_unknown_task_is_told_which_there_are(capsys, command):
    assert "there is no task 'digit'. Built in are textbook, digits, stdlib, pairs" in failure(capsys, command, "digit")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "0"], "--batch-size 0: expected a whole number, 1 or more"),
        (["--batch-size", "many"], "'--batch-size'"),
        (["--micro-batch", "3 bananas"], "--micro-batch '3 bananas': expected a number of rows"),
        (["--memory", "9" * 400 + "GiB"], "is no memory size: expected a number above 0 with its unit"),
        (["--memory", "2 bananas"], "'2 bananas' is no memory size: expected a number above 0 with its unit"),
        (
            ["--memory", "2GiB", "--micro-batch", "1GiB"],
            "--micro-batch 1GiB and --memory 2GiB both say what may be taken",
        ),
        (["--epochs", "0"], "--epochs 0"),
        (["--epochs", "1", "--updates", "2"], "give one of them"),
        (["--lr", "-1"], "--lr -1.0: expected a number above 0"),
        (["--lr-rule", "cubic"], "cubic"),
        (["--precision", "fp8"], "fp8"),
        (["--device", "toaster"], "--device 'toaster' cannot be used"),
        (["--warmup", "160"], "--warmup 160: the run has 160 updates"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_a_bad_option_of_train_is_one_line_that_names_it(capsys, tmp_path, arguments, message):
    assert message in failure(capsys, "train", "textbook", *arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["train", "digts"], "digits"),
        (["train", "digits", "--lr-rule", "lineer"], "linear"),
        (["train", "digits", "--precision", "bf61"], "bf16"),
        (["learn", "unit"], "units"),
        (["doctor", "--fail-on", "eror", "mine.py"], "error"),
    ],
)
def test_a_mistyped_task_value_or_lesson_is_told_the_nearest(capsys, arguments, meant):
    assert f"; did you mean {meant}?" in failure(capsys, *arguments)


def test_a_mistyped_command_or_option_is_told_the_nearest(capsys):
    assert "Did you mean 'train'" in failure(capsys, "trian")
    assert "--batch-size" in failure(capsys, "train", "digits", "--bach-size", "3")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("tr", {"train", "trace"}),
        ("verify di", {"digits"}),
        ("verify my", {"mytask.py"}),
        ("train --lr-rule l", {"linear"}),
    ],
)
def test_the_shell_completes_commands_tasks_files_and_values(tmp_path, typed, offered):
    (tmp_path / "mytask.py").touch()
    asked = {
        "_ANYBATCH_COMPLETE": "complete_bash",
        "COMP_WORDS": f"anybatch {typed}",
        "COMP_CWORD": str(len(typed.split())),
    }
    told = subprocess.run(
        [sys.executable, "-m", "anybatch"], env=os.environ | asked, cwd=tmp_path, capture_output=True, text=True
    )
    assert set(told.stdout.split()) == offered


def test_an_unknown_command_is_one_line(capsys):
    assert "brew" in failure(capsys, "brew")


def test_a_missing_file_is_named(capsys):
    assert "there is no task file nowhere/mine.py" in failure(capsys, "train", "nowhere/mine.py")


def test_no_task_at_all_gets_an_example(capsys):
    assert "anybatch train digits" in failure(capsys, "train")


def test_a_file_without_task_says_what_to_define(capsys, tmp_path):
    (tmp_path / "mine.py").write_text("x = 1\n")
    assert "mine.py has no function task(). Define one that returns anybatch.Task(" in failure(
        capsys, "train", "mine.py"
    )


def test_a_file_that_is_not_python_is_named(capsys, tmp_path):
    (tmp_path / "mine.txt").write_text("hello")
    assert "mine.txt is not a Python file" in failure(capsys, "train", "mine.txt")


def test_a_task_that_raises_shows_its_own_traceback_and_nothing_of_ours(capsys, tmp_path):
    source = "def task():\n    return build()\n\n\ndef build():\n    raise KeyError('no such column')\n"
    (tmp_path / "mine.py").write_text(source)
    assert run(["train", "mine.py"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("anybatch: task() of ")
    assert lines[-1].endswith("mine.py raised KeyError: 'no such column'. see: anybatch learn trace")
    assert lines[-2] == "KeyError: 'no such column'"
    assert sum("in task" in line or "in build" in line for line in lines) == 2
    assert not any("anybatch/" in line.replace(str(tmp_path), "") for line in lines)
    assert len(lines) < 12


def test_a_file_that_raises_while_it_is_loaded_does_so_too(capsys, tmp_path):
    (tmp_path / "mine.py").write_text("import no_such_module\n")
    assert run(["train", "mine.py"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "mine.py raised ModuleNotFoundError while it was loaded" in lines[-1]
    assert len(lines) < 9


def test_a_folder_that_is_no_run_is_refused(capsys, tmp_path):
    for arguments in (["report", "."], ["train", "--resume", "."]):
        assert "'.' has no run.json; a run folder holds run.json" in failure(capsys, *arguments)
    assert "'nowhere' does not exist; a run folder holds run.json" in failure(capsys, "report", "nowhere")


@pytest.mark.parametrize("settings", [{}, {"speed": 9}])
def test_a_run_whose_settings_are_not_those_of_this_version_is_not_resumed(capsys, tmp_path, settings):
    (tmp_path / "run.json").write_text(json.dumps({"kind": "train", "task": "textbook", "settings": settings}))
    assert "not those of anybatch" in failure(capsys, "train", "--resume", str(tmp_path))


def test_a_run_is_not_overwritten(capsys, task_file):
    run(["train", str(task_file), "--out", "out", "-q"])
    message = failure(capsys, "train", str(task_file), "--out", "out")
    assert "out already holds a run. Go on with it by --resume out" in message


def test_a_resumed_run_keeps_its_settings_and_task(capsys, task_file):
    run(["train", str(task_file), "--out", "out", "-q", "--epochs", "2"])
    assert "--epochs 3 with --resume" in failure(capsys, "train", "--resume", "out", "--epochs", "3")
    assert "not of textbook" in failure(capsys, "train", "textbook", "--resume", "out")
    assert "goes on in its own folder" in failure(capsys, "train", "--resume", "out", "--out", "other")
    assert run(["train", str(task_file), "--resume", "out", "--epochs", "2"]) == 0


def test_only_training_runs_are_resumed(capsys, task_file):
    run(["trace", str(task_file), "--out", "out", "-q"])
    assert "is a run of trace, which cannot be resumed" in failure(capsys, "train", "--resume", "out")


def test_a_comparison_without_seeds_or_micro_batches_is_refused(capsys):
    assert "--seeds 0" in failure(capsys, "compare", "textbook", "--seeds", "0")
    message = failure(capsys, "compare", "textbook", "--micro-batch", "64", "-q")
    assert "--micro-batch 64 with --batch-size 64" in message
