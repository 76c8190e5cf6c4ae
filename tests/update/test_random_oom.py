"""Memory runs out once, anywhere: a few of the hundred runs of `benchmarks.random_oom`, most kinds once."""

import pytest

from anybatch.state import once_more
from anybatch.update.stepping import Stepping
from benchmarks import random_oom

ANYWHERE, IN_THE_TAIL = (2, 3, 6, 7, 8), (10, 11, 14, 15)
"""Seeds: the last digit is the kind, and those from 10 to 19 fail after the last backward pass."""


@pytest.mark.filterwarnings("ignore:memory ran out", "ignore:BatchNorm")
def test_a_run_in_which_memory_ran_out_once_ends_bit_for_bit_as_one_in_which_it_did_not():
    ended = [random_oom.run(seed) for seed in (*ANYWHERE, *IN_THE_TAIL)]
    assert [str(one.setting) for one in ended if not one.is_right] == []
    assert sum(one.retries for one in ended) >= 3


@pytest.mark.filterwarnings("ignore:memory ran out", "ignore:BatchNorm")
def test_a_step_that_is_simply_made_again_does_not(monkeypatch):
    monkeypatch.setattr(Stepping, "step", lambda self, act: 0 * len([once_more(act)]))
    assert not all(random_oom.run(seed).is_right for seed in IN_THE_TAIL)


@pytest.mark.filterwarnings("ignore:memory ran out")
@pytest.mark.parametrize("kind", ["rows", "Tokens"])
def test_after_another_processes_out_of_memory_the_size_is_back_within_fifty_updates(kind):
    assert random_oom.updates_until_back(random_oom.KINDS[kind]) is not None
