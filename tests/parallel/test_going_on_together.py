"""What one rank runs into is everybody's: out of memory, errors; and what an update sends is counted."""

import pytest

from tests.parallel.ranks import Outcomes, largest

pytestmark = pytest.mark.xdist_group("two ranks")


@pytest.mark.parametrize("name", ["ddp_out_of_memory", "ddp_out_of_memory_coupled", "ddp_out_of_memory_second_pass"])
def test_out_of_memory_on_one_rank_starts_all_again_in_smaller_micro_batches(told: Outcomes, name: str):
    assert largest(told(name), "error") < 1e-12
    for rank in told(name):
        assert rank["retries"] == 1
        assert rank["split"] == 2


def test_memory_that_never_suffices_is_an_error_on_every_rank(told: Outcomes):
    for rank in told("ddp_out_of_memory_always"):
        assert rank.startswith("MemoryLimitError: memory ran out with a single row")


def test_an_error_of_one_rank_does_not_leave_the_others_waiting(told: Outcomes):
    others, failed = told("ddp_error_of_one_rank")
    assert others.startswith("ParallelError: rank 1 failed while it ran its micro-batches")
    assert failed == "ValueError: only here"


def test_fit_chooses_for_the_rows_of_each_rank_beside_the_buckets_of_ddp(told: Outcomes):
    assert [rank["size"] for rank in told("ddp_fit")] == [16, 8]
    assert largest(told("ddp_fit"), "error") < 1e-12


def test_fit_doubles_where_a_sharded_model_cannot_be_planned_and_says_why(told: Outcomes):
    for rank in told("fsdp_fit"):
        assert rank["reason"].startswith("PlanError: this ")
        assert "is sharded by fully_shard" in rank["reason"]
    assert largest(told("fsdp_fit"), "error") < 1e-12


@pytest.mark.parametrize("size", [12, 4, 1])
def test_ddp_reduces_once_per_update_whatever_the_number_of_micro_batches(told: Outcomes, size: int):
    # one bucket; three gathers of a few numbers: before the first forward, before the last pass, for the result
    for rank in told(f"ddp_collectives_{size}"):
        assert rank == {"gloo:all_reduce": 1, "gloo:all_gather": 3}


def test_without_no_sync_it_is_once_per_micro_batch(told: Outcomes):
    for rank in told("ddp_synchronising_every_micro_batch"):
        assert rank["gloo:all_reduce"] == 6


@pytest.mark.parametrize("size", [12, 4, 1])
def test_fsdp_scatters_gradients_once_per_update(told: Outcomes, size: int):
    # two sharded layers, whose reduce-scatter is an all-reduce on gloo, and the norm
    for rank in told(f"fsdp_collectives_{size}"):
        assert rank["gloo:all_reduce"] == 3


def test_fsdp_gathers_parameters_anew_in_each_pass_unless_they_are_kept(told: Outcomes):
    for again, kept in zip(told("fsdp_collectives_1"), told("fsdp_collectives_kept"), strict=True):
        assert kept["gloo:all_gather"] < 0.6 * again["gloo:all_gather"]


def test_in_lockstep_fsdp_sends_the_same_however_many_micro_batches(told: Outcomes):
    # a reduce-scatter, an all-reduce on gloo, for each of four units with parameters
    for one, seven in zip(told("fsdp_exact_norm_collectives_7"), told("fsdp_exact_norm_collectives_1"), strict=True):
        assert one == seven
        assert one["gloo:all_reduce"] == 4
