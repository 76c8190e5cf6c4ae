"""Who runs what: units that share stay together, and the lists name files that are there."""

from pathlib import Path

import pytest

from tests.scheduling import LONG, SINGLE, is_long, turn, unit

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", sorted({*LONG, *SINGLE}))
def test_what_is_listed_is_there(path):
    assert (ROOT / path).exists()


def test_a_file_stays_together_and_a_task_on_ranks_too():
    assert unit("tests/a/test_b.py::test_c[1]") == unit("tests/a/test_b.py::test_d") == "tests/a/test_b.py"
    ranks = "tests/app/training/test_ranks.py"
    assert unit(f"{ranks}::test_x[pairs-1-ddp]") == unit(f"{ranks}::test_y[pairs]") != unit(f"{ranks}::test_y[stdlib]")
    single = "tests/app/cli/test_torchrun.py"
    assert unit(f"{single}::test_x") != unit(f"{single}::test_y")


def test_long_files_come_first_and_are_not_quick():
    assert turn(f"{LONG[0]}::test_x") < turn(f"{LONG[1]}::test_x") < turn("tests/ragged/test_auto.py::test_x")
    assert is_long(f"{LONG[0]}::test_x")
    assert not is_long("tests/ragged/test_auto.py::test_x")
