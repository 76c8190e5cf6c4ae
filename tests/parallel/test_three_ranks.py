"""Rows that do not come out even: 40 over 3 ranks are 14, 13, 13; 7 are 6, 1 and none."""

import pytest

from tests.parallel.ranks import Outcomes, largest

pytestmark = pytest.mark.xdist_group("three ranks")


@pytest.mark.parametrize(
    "name",
    ["ddp_uneven_rows", "fsdp_uneven_rows", "ddp_rank_without_rows", "fsdp_rank_without_rows", "ddp_drop"],
)
def test_the_gradient_is_that_of_the_whole_batch(told_by_three: Outcomes, name: str):
    assert largest(told_by_three(name), "error") < 5e-7


@pytest.mark.parametrize(
    "name",
    [
        "ddp_uneven_tokens",
        "fsdp_uneven_tokens",
        "ddp_coupled",
        "ddp_exact_norm_rank_without_rows",
        "fsdp_exact_norm",
        "fsdp_exact_norm_rank_without_rows",
        "fsdp_exact_norm_updates",
        "fsdp_coupled_exact_norm",
    ],
)
def test_in_float64_to_the_last_digits(told_by_three: Outcomes, name: str):
    assert largest(told_by_three(name), "error") < 1e-12


def test_metrics_and_running_statistics_with_a_rank_that_has_no_rows(told_by_three: Outcomes):
    for key in ("error", "hits", "first", "rows"):
        assert largest(told_by_three("ddp_metrics"), key) < 1e-6
    for name in ("ddp_micro_norm", "fsdp_exact_norm_rank_without_rows", "fsdp_exact_norm_updates"):
        assert largest(told_by_three(name), "running") < 1e-12
