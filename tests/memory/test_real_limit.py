"""Memory that really runs out: a process under a limit of the system ends with the weights of one without."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("resource", reason="the system has no limits of this kind")

SCRIPT = Path(__file__).with_name("limited.py")


@pytest.mark.parametrize("case", ["rows", "tokens", "coupled"])
def test_the_weights_after_ten_updates_are_those_of_a_run_that_never_failed(case):
    seen = json.loads(
        subprocess.run(
            [sys.executable, str(SCRIPT), case], capture_output=True, text=True, check=True, timeout=300
        ).stdout
    )
    assert sum(seen["retries"]) > 0, "the limit was not felt"
    assert seen["difference"] < 1e-6
    assert seen["difference_to_settled"] == 0, "bit for bit what a run gives that was cut like this from the start"
