import subprocess
import sys

import pytest

from tests.processes.forked import run_code

SEES_TORCH = """
import sys
from anybatch.app.cli.main import run
code = run(sys.argv[1:])
assert not any(name.partition(".")[0] in ("torch", "numpy", "sklearn") for name in sys.modules), "torch was loaded"
sys.exit(code)
"""


def python(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["compare", "--help"],
        ["trace", "--help"],
        ["verify", "--help"],
        ["report", "--help"],
        ["--version"],
    ],
)
def test_help_loads_no_torch(arguments):
    done = python("-c", SEES_TORCH, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("arguments", [["train", "digit"], ["train", "textbook", "--batch-size", "0"], ["report", "x"]])
def test_bad_input_is_refused_without_torch(arguments):
    done = python("-c", SEES_TORCH, *arguments)
    assert done.returncode == 2, done.stderr


def test_train_says_something_before_it_loads_torch():
    watch = """
import sys
from anybatch.app.cli import main, screen
from anybatch.app.cli import train
def say(text, **_):
    assert "torch" not in sys.modules, "torch was loaded first"
    print(text)
    sys.exit(0)
train.say = say
main.run(["train", "textbook"])
"""
    done = python("-c", watch)
    assert (done.returncode, done.stderr) == (0, "")
    assert "training textbook" in done.stdout


def test_python_m_anybatch_is_the_command():
    done = python("-m", "anybatch", "--help")
    assert done.returncode == 0
    for command in ("train", "compare", "trace", "verify", "report"):
        assert command in done.stdout
    assert "Usage: anybatch" in done.stdout


@pytest.mark.parametrize(("module", "extra"), [("sklearn", "train"), ("torchdata", "train"), ("jinja2", "report")])
def test_a_package_that_is_not_installed_is_named_with_the_extra_that_brings_it(tmp_path, module, extra):
    without = f"import sys; sys.modules[{module!r}] = None; from anybatch.app.cli.main import run; sys.exit(run(sys.argv[1:]))"
    done = run_code(without, "train", "digits", "--updates", "1", "--out", str(tmp_path / "out"), "-q")
    assert done.returncode == 2
    assert f"pip install 'anybatch[{extra}]'" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
