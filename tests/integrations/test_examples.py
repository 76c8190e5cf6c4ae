"""The examples of the frameworks run, and learn."""

import warnings
from importlib import import_module

import pytest
import ray

EXAMPLES = {"hf_trainer": (6,), "trl_sft": (4,), "lightning_digits": (1,), "accelerate_digits": (2,)}
AT_MOST = {"hf_trainer": 2.6, "trl_sft": 6.5, "lightning_digits": 2.6, "accelerate_digits": 2.4}
"""A few updates already do better than, or at least as well as, guessing."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_tells_the_loss_of_whole_batches(name, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = import_module(f"examples.{name}").main(*EXAMPLES[name])
    assert 0 < loss < AT_MOST[name]


def test_ray_starts_again_after_a_killed_worker_with_the_same_weights():
    from examples.ray_digits import main

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        try:
            whole, killed = main(epochs=2), main(epochs=2, dies_at=1)
        finally:
            ray.shutdown()
    assert (whole["first"], killed["first"]) == (0, 1)
    assert killed["weights"] == whole["weights"]
