"""Format, lint and types are part of the tests, so that what CI runs gates them."""

import subprocess
import sys
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "tool",
    [["ruff", "format", "--check", "."], ["ruff", "check", "--no-fix", "."], ["mypy"]],
    ids=["format", "lint", "types"],
)
def test_the_tree_is_clean(tool):
    done = subprocess.run([sys.executable, "-m", *tool], cwd=HOUSE, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
