"""The examples of the frameworks run and learn; that of TRL compares gradients."""

import warnings
from importlib import import_module

import pytest

EXAMPLES = {
    "hf_trainer": (6,),
    "sentence_pairs": (6,),
    "lightning_digits": (1,),
    "accelerate_digits": (2,),
}
AT_MOST = {"hf_trainer": 2.6, "sentence_pairs": 4.2, "lightning_digits": 2.6, "accelerate_digits": 2.4}
"""A few updates already do better than, or at least as well as, guessing."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_tells_the_loss_of_whole_batches(name, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = import_module(f"examples.{name}").main(*EXAMPLES[name])
    assert 0 < loss < AT_MOST[name]


def test_a_loss_of_ones_own_in_trl_is_off_and_exact_is_not():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        errors = import_module("examples.trl_sft_lora").main(2)
    assert errors["SmoothedSFTTrainer"] > 1
    assert errors["exact(SmoothedSFTTrainer)"] < 5e-6
