"""Models in DDP or sharded by fully_shard: the gradient and the numbers of the whole batch, on every rank."""

import pytest

from tests.parallel.ranks import Outcomes, largest

pytestmark = pytest.mark.xdist_group("two ranks")

BOTH = pytest.mark.parametrize("kind", ["ddp", "fsdp"])


@pytest.mark.parametrize(
    "name",
    [
        *(
            f"{kind}_{name}"
            for kind in ("ddp", "fsdp")
            for name in (
                "uneven_rows",
                "rank_without_rows",
                "empty_tensors",
                "rank_without_targets",
                "class_weights",
                "sum_loss",
                "adds_to_gradients",
                "inside_a_model",
                "error_in_a_forward",
            )
        ),
        "ddp_bucket_views",
        "ddp_unused_parameters",
        "ddp_comm_hook",
        "ddp_drop",
        "fsdp_hsdp",
        "fsdp_keeps_parameters",
    ],
)
def test_the_gradient_is_that_of_the_whole_batch(told: Outcomes, name: str):
    assert largest(told(name), "error") < 5e-7


@BOTH
def test_uneven_tokens_and_numbers_of_micro_batches_are_exact_in_float64(told: Outcomes, kind: str):
    assert largest(told(f"{kind}_uneven_tokens"), "error") < 1e-12
    assert largest(told(f"{kind}_uneven_tokens"), "loss") < 1e-12
    assert largest(told(f"{kind}_uneven_tokens"), "units") == 0


@BOTH
def test_the_mean_over_ranks_of_their_means_is_not(told: Outcomes, kind: str):
    assert min(rank["mean_of_means"] for rank in told(f"{kind}_uneven_tokens")) > 0.1


def test_a_flag_toggled_between_forward_and_backward_is_not(told: Outcomes):
    assert min(rank["error"] for rank in told("ddp_toggled_between_forward_and_backward")) > 0.1


@BOTH
def test_loss_and_units_are_those_of_the_whole_batch(told: Outcomes, kind: str):
    for rank in told(f"{kind}_uneven_rows"):
        assert rank["loss"] < 1e-6
        assert rank["units"] == 40
    assert largest(told(f"{kind}_rank_without_targets"), "loss") < 1e-6
    assert largest(told(f"{kind}_sum_loss"), "loss") < 1e-5


@BOTH
def test_metrics_are_those_of_the_whole_batch_and_rows_come_rank_by_rank(told: Outcomes, kind: str):
    for key in ("error", "hits", "first", "rows"):
        assert largest(told(f"{kind}_metrics"), key) < 1e-6


@BOTH
def test_a_batch_of_no_units_leaves_zero_gradients(told: Outcomes, kind: str):
    for rank in told(f"{kind}_no_targets_at_all"):
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


@BOTH
def test_updates_with_clipping_are_those_of_one_process(told: Outcomes, kind: str):
    for key in ("weights", "norms", "losses"):
        assert largest(told(f"{kind}_updates_with_clipping"), key) < 1e-12
    assert all(rank["clipped"] for rank in told(f"{kind}_updates_with_clipping"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ddp_static_graph", "static_graph=True"),
        ("ddp_not_called", "not model.module(...)"),
        ("ddp_comm_hook_refused", "has the comm hook _halved, but dropping micro-batches"),
        ("ddp_unused_parameters_unannounced", "find_unused_parameters=True"),
        ("fsdp_drop", "on_nonfinite='skip'"),
        ("fsdp_low_precision_sums", "reduce_dtype=torch.float32"),
        ("fsdp_tensor_parallel", "cut by tensor parallelism too"),
    ],
)
def test_what_would_be_wrong_is_refused_by_name_on_every_rank(told: Outcomes, name: str, message: str):
    for rank in told(name):
        assert rank.startswith("ParallelError: ")
        assert message in rank


@BOTH
def test_an_error_before_the_first_forward_is_everybodys(told: Outcomes, kind: str):
    for rank, text in enumerate(told(f"{kind}_error_in_units")):
        assert text.startswith("UnitsError" if rank == 1 else "ParallelError: rank 1 failed before its first forward")


@BOTH
def test_clipping_by_value_and_a_scaler_are_those_of_one_process(told: Outcomes, kind: str):
    for key in ("clip_value", "scaler"):
        assert largest(told(f"{kind}_value_clipping_and_scaling"), key) < 1e-12


@BOTH
def test_an_error_in_a_forward_leaves_gradients_as_they_were(told: Outcomes, kind: str):
    assert largest(told(f"{kind}_error_in_a_forward"), "left") == 0


@BOTH
def test_a_rank_that_overflows_holds_every_ranks_step_and_halves_every_scale(told: Outcomes, kind: str):
    for rank in told(f"{kind}_overflow"):
        assert rank == {"applied": False, "scale": 2048.0, "weights": 0.0}


def test_an_overflow_in_one_ranks_shard_is_everybodys(told: Outcomes):
    for rank in told("fsdp_overflow_of_a_shard"):
        assert rank == {"applied": False, "scale": 2048.0}


@BOTH
def test_a_gradient_that_is_not_finite_is_raised_everywhere_and_names_the_rank(told: Outcomes, kind: str):
    for rank in told(f"{kind}_raise"):
        assert rank.startswith("NonFiniteError")
        assert "first in micro-batch 1 of 4 of rank 1" in rank


@BOTH
def test_an_update_is_skipped_by_all_ranks_and_the_next_one_applied(told: Outcomes, kind: str):
    for rank in told(f"{kind}_skip"):
        assert not rank["applied"]
        assert rank["again"]
        assert rank["units"] == 16


def test_a_dropped_micro_batch_is_numbered_over_all_ranks(told: Outcomes):
    assert largest(told("ddp_drop"), "units") == 0
    assert largest(told("ddp_drop"), "dropped") == 0


def test_sharded_parameters_in_bf16_are_summed_in_fp32(told: Outcomes):
    assert largest(told("fsdp_low_precision"), "error") < 1e-2
