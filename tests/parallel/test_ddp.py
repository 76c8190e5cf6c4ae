"""Models in DistributedDataParallel: the gradient and the numbers of the whole batch, on every rank."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.parallel import scenarios
from tests.parallel.ranks import outcomes

Outcomes = Callable[[str], list[Any]]


@pytest.fixture(scope="module", params=[2, 3])
def told(request: pytest.FixtureRequest) -> Outcomes:
    every = outcomes(scenarios.DDP, request.param)
    return lambda name: every[name]


def largest(told: list[Any], key: str) -> float:
    """The largest over ranks; a scenario that raised is shown instead."""
    assert not isinstance(told[0], str), told
    return max(abs(float(rank[key])) for rank in told)


@pytest.mark.parametrize(
    "name",
    [
        "ddp_uneven_rows",
        "ddp_rank_without_rows",
        "ddp_empty_tensors",
        "ddp_rank_without_targets",
        "ddp_class_weights",
        "ddp_sum_loss",
        "ddp_adds_to_gradients",
        "ddp_bucket_views",
        "ddp_unused_parameters",
        "ddp_comm_hook",
        "ddp_inside_a_model",
    ],
)
def test_the_gradient_is_that_of_the_whole_batch(told: Outcomes, name: str):
    assert largest(told(name), "error") < 5e-7


def test_uneven_tokens_and_numbers_of_micro_batches_are_exact_in_float64(told: Outcomes):
    assert largest(told("ddp_uneven_tokens"), "error") < 1e-12
    assert largest(told("ddp_uneven_tokens"), "loss") < 1e-12
    assert largest(told("ddp_uneven_tokens"), "units") == 0


def test_the_mean_over_ranks_of_their_means_is_not(told: Outcomes):
    assert min(rank["mean_of_means"] for rank in told("ddp_uneven_tokens")) > 0.1


def test_a_flag_toggled_between_forward_and_backward_is_not(told: Outcomes):
    assert min(rank["error"] for rank in told("ddp_toggled_between_forward_and_backward")) > 0.1


def test_loss_and_units_are_those_of_the_whole_batch(told: Outcomes):
    for rank in told("ddp_uneven_rows"):
        assert rank["loss"] < 1e-6
        assert rank["units"] == 40
    assert largest(told("ddp_rank_without_targets"), "loss") < 1e-6
    assert largest(told("ddp_sum_loss"), "loss") < 1e-5


def test_metrics_are_those_of_the_whole_batch_and_rows_come_rank_by_rank(told: Outcomes):
    for key in ("error", "hits", "first", "rows"):
        assert largest(told("ddp_metrics"), key) < 1e-6


def test_a_batch_of_no_units_leaves_zero_gradients(told: Outcomes):
    for rank in told("ddp_no_targets_at_all"):
        assert rank == {"norm": 0.0, "loss": 0.0, "units": 0.0}


def test_bf16_parameters_are_summed_in_fp32_over_micro_batches_and_ranks(told: Outcomes):
    assert largest(told("ddp_bf16"), "error") < 3e-3
    assert all(rank["is_fp32"] for rank in told("ddp_bf16"))


def test_bf16_sums_lose_a_digit(told: Outcomes):
    assert min(rank["plain"] for rank in told("ddp_bf16")) > 3 * largest(told("ddp_bf16"), "error")


def test_a_parameter_that_no_rank_used_has_no_gradient(told: Outcomes):
    assert largest(told("ddp_unused_parameters"), "never") == 0


def test_a_comm_hook_is_called_once_per_bucket(told: Outcomes):
    assert [rank["calls"] for rank in told("ddp_comm_hook")] == [1] * len(told("ddp_comm_hook"))


def test_updates_with_clipping_are_those_of_one_process(told: Outcomes):
    for key in ("weights", "norms", "losses"):
        assert largest(told("ddp_updates_with_clipping"), key) < 1e-12
    assert all(rank["clipped"] for rank in told("ddp_updates_with_clipping"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ddp_static_graph", "static_graph=True"),
        ("ddp_not_called", "not model.module(...)"),
        ("ddp_comm_hook_refused", "has the comm hook _halved, but dropping micro-batches"),
        ("ddp_unused_parameters_unannounced", "find_unused_parameters=True"),
    ],
)
def test_what_would_be_wrong_is_refused_by_name_on_every_rank(told: Outcomes, name: str, message: str):
    for rank in told(name):
        assert rank.startswith("ParallelError: ")
        assert message in rank


def test_an_error_before_the_first_forward_is_everybodys(told: Outcomes):
    for rank, text in enumerate(told("ddp_error_in_units")):
        assert text.startswith("UnitsError" if rank == 1 else "ParallelError: rank 1 failed before its first forward")
