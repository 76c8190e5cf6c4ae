"""The pool of ranks: results by rank, errors as told, and a rank that dies or hangs fails its own test only."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.processes import ranks
from tests.processes.ranks import RankError, Ranks, on_ranks, raised_on_ranks


def summed(start: float) -> tuple[int, float, torch.Tensor]:
    value = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(value)
    return dist.get_rank(), float(value), torch.rand(2)


def failing(on: int | None = None) -> int:
    if on in (None, dist.get_rank()):
        raise ValueError(f"of rank {dist.get_rank()}")
    return dist.get_rank()


def process_of(dies: int | None = None) -> int:
    if dies == dist.get_rank():
        os.kill(os.getpid(), signal.SIGKILL)
    if dies is not None:
        dist.barrier()
    return os.getpid()


def hanging() -> None:
    if dist.get_rank() == 1:
        signal.pause()


@pytest.fixture
def own_ranks():
    found = Ranks()
    yield found
    found.end()


def test_results_come_by_rank_and_every_rank_has_the_same_seed():
    first, second = on_ranks(2, summed, 3.0)
    assert (first[:2], second[:2]) == ((0, 7.0), (1, 7.0))
    assert torch.equal(first[2], second[2])


def test_the_state_of_one_scenario_is_not_the_next_ones():
    first, again = on_ranks(2, summed, 4.0), on_ranks(2, summed, 5.0)
    assert torch.equal(first[0][2], again[0][2])


def test_what_was_raised_comes_back_as_text():
    assert raised_on_ranks(2, failing) == ["ValueError: of rank 0", "ValueError: of rank 1"]


def test_an_error_that_nobody_expects_fails_with_its_traceback():
    with pytest.raises(AssertionError, match=r"rank 0 of 2 raised[\s\S]*in failing"):
        on_ranks(2, failing)


def test_an_error_that_does_not_come_fails():
    with pytest.raises(AssertionError, match="rank 0 of 2 raised nothing and returned 0"):
        raised_on_ranks(2, failing, on=1)


def test_the_same_processes_serve_until_one_raises_alone_or_dies(own_ranks):
    before = own_ranks.outcomes(2, process_of)
    assert own_ranks.outcomes(2, process_of, dies=7) == before
    own_ranks.outcomes(2, failing)
    assert own_ranks.outcomes(2, process_of, 7) == before
    own_ranks.outcomes(2, failing, on=1)
    after = own_ranks.outcomes(2, process_of, 8)
    assert set(after).isdisjoint(before)
    with pytest.raises(RankError, match="rank 0 died with code -9"):
        own_ranks.outcomes(2, process_of, dies=0)
    assert set(own_ranks.outcomes(2, process_of, 9)).isdisjoint(after)


def test_a_rank_that_hangs_is_ended(own_ranks, monkeypatch):
    own_ranks.outcomes(2, process_of)
    monkeypatch.setattr(ranks, "PATIENCE", 3.0)
    with pytest.raises(RankError, match=r"no answer of ranks \[.*1\] within 3 s"):
        own_ranks.outcomes(2, hanging)
    monkeypatch.undo()
    assert len(own_ranks.outcomes(2, process_of, 7)) == 2


def test_a_scenario_is_run_once(own_ranks):
    assert own_ranks.outcomes(2, summed, 1.0) is own_ranks.outcomes(2, summed, 1.0)
