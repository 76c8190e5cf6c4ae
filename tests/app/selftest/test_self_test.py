"""`anybatch self-test`: every check passes on the CPU and on the pretend accelerator, and one that does not is told."""

import json

import pytest
import torch

from anybatch.app.selftest import self_testing
from anybatch.app.selftest.self_testing import Checked, run_self_test
from tests.accelerator.on_device import on_device
from tests.accelerator.plugged import limit, plug
from tests.processes.forked import run_anybatch

EXACT = [
    "targets that are ignored",
    "class weights",
    "a contrastive loss over all rows",
    "the mean of means, to see it fail",
]


def test_the_command_prints_a_table_and_leaves_a_page_and_a_json(tmp_path):
    done = run_anybatch("self-test", "--device", "cpu", "--rows", "512", "--out", str(tmp_path / "found"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found" / "self-test.json").read_text())
    assert found["has_passed"]
    assert found["device"] == "cpu"
    assert torch.__version__.startswith(found["versions"]["torch"])  # which may end in "+cu132"
    names = [check["name"] for check in found["checks"]]
    assert set(EXACT) <= set(names)
    page = (tmp_path / "found" / "self-test.html").read_text()
    for check in found["checks"]:
        assert check["name"] in done.stdout
        assert check["found"] in done.stdout
        assert check["name"] in page
    assert "http" not in page.replace("http://www.w3.org", "")


@on_device
def test_every_check_passes_on_the_accelerator():
    with limit(torch.accelerator.memory_allocated() + 2**28), pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_testing, "REPEATS", 1)  # times decide nothing
        found = run_self_test(plug(), versions={}, num_rows=2048)
    assert {check.group for check in found.checks} == {"exactness", "memory", "speed"}
    assert found.device == "pretend:0"
    failed = [check for check in found.checks if not check.has_passed]
    assert not failed, failed
    (again,) = [check for check in found.checks if check.name.startswith("memory runs out")]
    assert "pretended" not in again.name


def test_what_fails_is_told_and_the_rest_is_run(monkeypatch):
    def breaks(device: torch.device):
        yield Checked(group="exactness", name="one", found="1", wanted="0", has_passed=False)
        raise RuntimeError("CUDA error: device-side assert\nand more")

    def passes(device: torch.device, rows: int):
        yield Checked(group="speed", name="two", found="1", wanted="", has_passed=True)

    monkeypatch.setattr(self_testing, "exactness_checks", breaks)
    monkeypatch.setattr(self_testing, "memory_checks", passes)
    monkeypatch.setattr(self_testing, "speed_checks", passes)
    told = []
    found = run_self_test(torch.device("cpu"), versions={}, tell=told.append)
    assert [check.name for check in found.checks] == ["one", "the rest of exactness", "two", "two"]
    assert told == list(found.checks)
    assert found.checks[1].found == "RuntimeError: CUDA error: device-side assert"
    assert not found.has_passed


def test_a_gradient_that_is_off_fails_its_check(monkeypatch):
    whole = self_testing.Accumulator

    class Off(whole):
        def backward(self, batch, **options):
            found = super().backward(batch, **options)
            next(iter(self.model.parameters())).grad.mul_(1.001)
            return found

    monkeypatch.setattr(self_testing, "Accumulator", Off)
    checks = list(self_testing.exactness_checks(torch.device("cpu")))
    assert not any(check.has_passed for check in checks if check.wanted == "at most 2e-06")


@pytest.mark.parametrize("device", ["nowhere", "cuda"])
def test_a_device_that_is_not_there_is_refused(device):
    done = run_anybatch("self-test", "--device", device)
    assert done.returncode == 2
    assert f"--device {device!r} cannot be used" in done.stderr
