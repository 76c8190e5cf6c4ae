"""Scripts of people who had not read the rules, judged from stored logs; `python -m benchmarks.doctor_zoo` runs them."""

from pathlib import Path

import pytest

from anybatch.doctor.judging import judge
from benchmarks.doctor_zoo.stored_logs import stored
from benchmarks.doctor_zoo.zoo_scripts import FILES, faults, read_scripts

SCRIPTS = {script.name: script for file in FILES for script in read_scripts(file)}
JUDGED = [script for script in SCRIPTS.values() if script.launch != "module"]
FRAMEWORKS = {"accelerate", "deepspeed", "lightning", "transformers", "trl"}


@pytest.fixture(scope="module")
def logs():
    return stored()


def test_there_are_more_than_sixty_of_each_by_others_beside_our_own():
    own = Path(__file__).parent / "zoo"
    numbers = {group: sum(script.group == group for script in JUDGED) for group in ("wrong", "right")}
    assert numbers["wrong"] >= 60
    assert numbers["right"] >= 60
    assert sum(1 for _ in own.glob("*/*.py")) == 69


@pytest.mark.parametrize("script", JUDGED, ids=lambda script: f"{script.group}-{script.name}")
def test_a_stored_log_is_judged_as_its_script_is_marked(script, logs):
    assert list(faults(script, SCRIPTS.values(), judge(logs[script.name]))) == []


def test_every_framework_and_ranks_have_a_stored_log(logs):
    kept = [script for script in JUDGED if any(log.has_passes for log in logs[script.name])]
    assert {name for script in kept for name in script.frameworks} >= FRAMEWORKS
    for group in ("wrong", "right"):
        assert [len(logs[script.name]) for script in kept if script.launch == "torchrun 2" and script.group == group]


def test_a_mark_that_is_missed_and_an_error_that_is_not_marked_are_told(logs):
    script, other = SCRIPTS["not_divided_enumerate"], SCRIPTS["gan"]
    diagnosis = judge(logs[script.name])
    assert [fault for fault in faults(other, (), diagnosis) if "not-divided" in fault]
    assert list(faults(script, (), judge(logs[other.name])))
