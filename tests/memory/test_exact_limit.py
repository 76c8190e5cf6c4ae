"""Fit and plan against every malloc of a process, where none above the limit is granted."""

import json

import pytest

from benchmarks.every_malloc import in_own_process


@pytest.fixture(scope="module")
def counted():
    ran = in_own_process("tests.memory.every_byte")
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["fake", "real"])
def test_growing_batches_use_the_memory_and_never_ask_for_more(counted, kind):
    seen = counted[kind]
    assert seen["method"].startswith(kind)
    assert seen["refused"] == 0
    assert min(seen["used"][1:]) >= 0.8


@pytest.mark.parametrize("kind", ["fake", "real"])
def test_a_predicted_peak_is_what_every_malloc_adds_up_to(counted, kind):
    assert all(-0.03 <= off <= 0.06 for off in counted[kind]["off"]), counted[kind]["off"]


def test_metering_a_step_takes_little_beside_the_step(counted):
    assert counted["metering"] < 1.2


def test_the_default_look_takes_less_than_the_update(counted):
    assert all(look < 0.7 for look in counted["looking"]), counted["looking"]
