"""What the benchmarks claim and no noise can change: exactness and peak memory."""

import pytest

from benchmarks import batchnorm, coupled, exactness, peak


@pytest.mark.parametrize("case", exactness.cases(), ids=lambda case: case.name)
def test_anybatch_is_at_the_floor_and_the_textbook_loop_is_not(case):
    errors = exactness.measure(case)
    is_bf16 = "bf16" in case.name
    assert errors.anybatch < (2.5e-3 if is_bf16 else 5e-7)
    assert errors.textbook_loop > (1e-2 if is_bf16 else 0.1)


def test_peak_memory_does_not_grow_with_the_number_of_micro_batches():
    measured = peak.convolutional(counts=(1, 2, 64))
    assert measured[64] <= 1.01 * measured[1]
    assert measured[64] <= 1.001 * measured[2]


def test_the_gradients_are_all_that_accumulation_adds():
    measured = peak.transformer(counts=(1, 2, 8))
    assert measured[8] <= 1.001 * measured[2]
    assert measured[2] <= 1.15 * measured[1]


def test_exact_batch_norm_is_exact_in_a_fraction_of_the_memory_and_plain_accumulation_is_wrong():
    measured = batchnorm.measure(rounds=2, rows=32)
    assert measured["exact, offload to disk"].error < 1e-12
    assert measured["exact, offload to disk"].memory < 0.35
    assert measured["exact, nothing offloaded"].memory > 0.9
    assert measured["plain accumulation (micro)"].error > 0.2


def test_a_coupled_loss_is_exact_in_a_fraction_of_the_memory_and_plain_accumulation_is_wrong():
    measured = coupled.measure(rounds=2, rows=32)
    assert measured["anybatch Coupled"].error < 1e-13
    assert measured["anybatch Coupled"].memory < 0.5
    assert measured["plain accumulation"].error > 1e-2
