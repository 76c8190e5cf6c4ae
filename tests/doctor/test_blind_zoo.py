"""Scripts of people who had not read the rules: their stored logs are judged, those of each framework are run as well."""

from pathlib import Path

import pytest

from anybatch.doctor import judge_folder
from anybatch.doctor.judging import judge
from benchmarks.doctor_zoo.stored_logs import stored
from benchmarks.doctor_zoo.watched_forks import watch_forked
from benchmarks.doctor_zoo.zoo_scripts import FILES, faults, read_scripts
from tests.processes.forked import run_function

SCRIPTS = {script.name: script for file in FILES for script in read_scripts(file)}
JUDGED = [script for script in SCRIPTS.values() if script.launch != "module"]
LOADED = {"accelerate", "lightning", "transformers"}
"""Frameworks that are loaded once for all scripts; `python -m benchmarks.doctor_zoo` runs those of DeepSpeed and TRL too."""
FRAMEWORKS = [
    script
    for script in (*read_scripts("second"), *read_scripts("frameworks"))
    if script.frameworks and script.frameworks <= LOADED
]


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


def test_a_mark_that_is_missed_and_an_error_that_is_not_marked_are_told():
    script, other = SCRIPTS["not_divided_enumerate"], SCRIPTS["gan"]
    diagnosis = judge(stored()[script.name])
    assert [fault for fault in faults(other, (), diagnosis) if "not-divided" in fault]
    assert list(faults(script, (), judge(stored()[other.name])))


def run_frameworks(folder: str) -> None:
    assert watch_forked(FRAMEWORKS, Path(folder)) == []


def test_scripts_of_accelerate_lightning_and_transformers_are_run_and_judged(tmp_path):
    done = run_function(run_frameworks, str(tmp_path))
    assert done.returncode == 0, done.stderr
    used = {name for script in FRAMEWORKS for name in script.frameworks}
    assert used == LOADED
    for script in FRAMEWORKS:
        assert list(faults(script, (), judge_folder(tmp_path / script.name))) == [], script.name
