from threading import Thread

import pytest
from torch.distributed import HashStore

from anybatch import ParallelError
from anybatch.app.training.launch import Launch, agree_on_round, find_launch, is_lost_rank


def test_a_process_started_by_hand_is_alone():
    assert find_launch({}) is None
    assert find_launch({"RANK": "0"}) is None


def test_a_rank_of_torchrun_knows_its_place_and_its_launch():
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "job"}
    assert find_launch(environ) == Launch(rank=3, size=4, local_rank=1, name="job")


def test_launches_that_nobody_named_are_told_apart():
    environ = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    assert find_launch(environ).name not in (None, "none")


def agree(store, ranks, size):
    """What these ranks agree on, the first of them ahead of the others."""
    found = {}
    threads = [
        Thread(target=lambda rank=rank: found.update({rank: agree_on_round(store, rank, size)})) for rank in ranks
    ]
    for thread in threads:
        thread.start()
        thread.join(0.1)
    for thread in threads:
        thread.join(600)
    return found


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_ranks_that_were_restarted_agree_on_a_round_of_their_own_in_a_store_that_remembers_the_last(order):
    store = HashStore()
    rounds = [set(agree(store, order, 3).values()) for _ in range(3)]
    assert [len(names) for names in rounds] == [1, 1, 1]
    assert len(set.union(*rounds)) == 3


def test_a_rank_killed_before_all_agreed_leaves_nothing_that_misleads_the_next():
    store = HashStore()
    store.set("anybatch/word/1", "dead")
    store.set("anybatch/answer", "gone dead")
    store.set("anybatch/taken/1", "gone")
    assert len(set(agree(store, (1, 0), 2).values())) == 1


@pytest.mark.parametrize(("rank", "other"), [(0, 1), (1, 0)])
def test_a_rank_that_never_comes_is_named(rank, other):
    with pytest.raises(ParallelError, match=f"rank {rank} of 2 waited 0 s for rank {other}"):
        agree_on_round(HashStore(), rank, 2, seconds=0.0)


@pytest.mark.parametrize(
    "message",
    [
        "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:29101",
        "[gloo/transport/tcp/pair.cc:532] Read error [127.0.0.1]:4242: Connection reset by peer",
        "[gloo/transport/tcp/pair.cc:600] writev [127.0.0.1]:4242: Broken pipe",
        "NCCL error in: ProcessGroupNCCL.cpp:3356, remote process exited or there was a network error",
        "NCCL communicator was aborted on rank 1.",
        "[gloo/transport/tcp/unbound_buffer.cc:80] Timed out waiting 1800000ms for recv operation to complete",
        "[gloo/transport/tcp/pair.cc:490] connect [127.0.0.1]:4242: Connection refused",
        "wait timeout after 300000ms, keys: /default_pg/0//cpu//0/0",
    ],
)
def test_what_a_collective_says_of_a_rank_that_has_gone_is_known(message):
    assert is_lost_rank(RuntimeError(message))


def test_other_errors_are_not_taken_for_it():
    assert not is_lost_rank(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_lost_rank(ValueError("Connection closed by peer"))
