"""A forked process is what `subprocess.run` would have started: its own folder, environment, output, exit code."""

import os
import signal
import sys
import time

import pytest

from tests.processes.forked import run_anybatch, run_code, run_function, run_module, started


def test_output_exit_code_folder_environment_and_arguments(tmp_path):
    code = (
        "import os, sys; print(os.getcwd(), os.environ['PLANTED'], sys.argv[1:], sys.stdin.read()); "
        "print('oh', file=sys.stderr); sys.exit(3)"
    )
    done = run_code(code, "one", "two", cwd=tmp_path, env={"PLANTED": "seed"})
    assert (done.returncode, done.stderr) == (3, "oh\n")
    assert done.stdout == f"{tmp_path} seed ['one', 'two'] \n"
    assert "PLANTED" not in os.environ


def test_torch_is_there_and_this_process_is_not_touched():
    done = run_code("import sys; print('torch' in sys.modules); sys.modules['json'].planted = 1")
    assert done.stdout == "True\n"
    assert not hasattr(sys.modules["json"], "planted")


def test_an_error_is_a_traceback_and_code_1():
    done = run_code("1 / 0")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ZeroDivisionError: division by zero")


def test_the_command_line():
    assert run_anybatch("--version").stdout.startswith("anybatch ")
    assert run_anybatch("brew").returncode == 2


def test_a_module():
    assert "Usage: anybatch" in run_module("anybatch", "--help").stdout


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed_says_by_which_signal(number):
    with started(signal.pause) as process:
        os.kill(process.pid, number)
        assert process.wait().returncode == -number


def test_an_interrupt_is_a_keyboard_interrupt_whatever_started_pytest():
    with started(print_and_wait) as process:
        while not (process.folder / "stdout").exists() or not (process.folder / "stdout").read_text():
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        done = process.wait()
    assert "KeyboardInterrupt" in done.stderr


def print_and_wait() -> None:
    print("here", flush=True)
    signal.pause()


def test_what_still_runs_is_ended_with_its_block():
    with started(signal.pause) as process:
        pass
    assert process.process.exitcode == -signal.SIGKILL


def test_a_function_tells_by_its_exit_code():
    assert run_function(int, 5).returncode == 5
