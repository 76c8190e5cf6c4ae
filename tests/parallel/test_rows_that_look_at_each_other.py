"""Coupled losses and BatchNorm over all ranks' rows."""

import pytest

from tests.parallel.ranks import Outcomes, largest

pytestmark = pytest.mark.xdist_group("two ranks")

COUPLED = ["ddp_coupled", "ddp_coupled_rank_without_rows", "fsdp_coupled", "fsdp_coupled_rank_without_rows"]


@pytest.mark.parametrize("name", COUPLED)
def test_a_coupled_loss_sees_all_ranks_rows_and_its_own_parameters_count_once(told: Outcomes, name: str):
    for key in ("error", "loss", "rows"):
        assert largest(told(name), key) < 1e-12
    for key in ("units", "seen"):
        assert largest(told(name), key) == 0


def test_a_loss_that_sees_its_own_ranks_rows_alone_is_another(told: Outcomes):
    assert min(rank["own_rows_only"] for rank in told("ddp_coupled")) > 0.1


EXACT = [
    "ddp_exact_norm",
    "ddp_exact_norm_rank_without_rows",
    "ddp_sync_norm",
    "fsdp_exact_norm",
    "fsdp_exact_norm_one_unit",
    "fsdp_exact_norm_rank_without_rows",
]


@pytest.mark.parametrize("name", EXACT)
def test_exact_batch_norm_pools_over_ranks(told: Outcomes, name: str):
    for key in ("error", "running", "loss"):
        assert largest(told(name), key) < 1e-12
    assert largest(told(name), "tracked") == 0
    assert largest(told(name), "is_held") == 0


def test_statistics_of_each_rank_alone_are_far_off(told: Outcomes):
    assert min(rank["per_rank"] for rank in told("ddp_exact_norm")) > 0.1


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_updates_with_exact_batch_norm_are_those_of_one_process(told: Outcomes, kind: str):
    for key in ("error", "running", "outputs"):
        assert largest(told(f"{kind}_exact_norm_updates"), key) < 1e-12


def test_gradients_of_bf16_micro_batches_that_run_together_are_summed_in_fp32(told: Outcomes):
    assert largest(told("fsdp_exact_norm_low_precision"), "error") == 0


def test_after_an_error_among_micro_batches_that_run_together_a_sharded_model_goes_on(told: Outcomes):
    assert largest(told("fsdp_exact_norm_error_in_a_forward"), "left") == 0
    assert largest(told("fsdp_exact_norm_error_in_a_forward"), "error") < 1e-12


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_exact_batch_norm_under_a_coupled_loss(told: Outcomes, kind: str):
    assert largest(told(f"{kind}_coupled_exact_norm"), "error") < 1e-12


@pytest.mark.parametrize("name", ["ddp_micro_norm", "fsdp_micro_norm"])
def test_running_statistics_are_merged_over_ranks(told: Outcomes, name: str):
    assert largest(told(name), "running") < 1e-12


def test_the_warning_tells_the_error_against_the_batch_of_all_ranks(told: Outcomes):
    for rank in told("ddp_measured_norm"):
        assert rank["told"] == pytest.approx(rank["error"], rel=0.05)
