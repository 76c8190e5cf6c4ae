"""Memory that really runs out: a process under a limit of the system ends with the weights of one without."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("resource", reason="the system has no limits of this kind")

SCRIPT = Path(__file__).with_name("limited.py")
LARGE_ONES_APART = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
}
"""Tensors are mapped and given back one by one, so that what counts against the limit is what is alive."""


@pytest.mark.parametrize("case", ["rows", "tokens", "coupled", "exact"])
def test_the_weights_after_ten_updates_are_those_of_a_run_that_never_failed(case):
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), case],
        capture_output=True,
        text=True,
        env={**os.environ, **LARGE_ONES_APART},
    )
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout)
    assert sum(seen["retries"]) > 0, "the limit was not felt"
    assert seen["difference"] < 1e-12
    assert seen["difference_to_settled"] == 0, "bit for bit what a run gives that was cut like this from the start"
