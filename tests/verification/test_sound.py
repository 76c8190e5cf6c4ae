"""verify says exact of sound models of all kinds, in float64 and in their own precision, whatever the cut."""

import pytest
import torch

from anybatch import verify
from tests.verification.sound import LENGTH, sorts


@pytest.mark.parametrize("kind", sorts())
def test_a_sound_model_is_exact(kind):
    torch.manual_seed(7)
    model, objective, batch, options = sorts()[kind]()
    verdict = verify(model, objective, batch, **options)
    assert verdict.is_exact, verdict.describe()
    assert not verdict.causes
    assert {cut.precision for cut in verdict.cuts} == {"float64", "own"}
    assert any(len(set(cut.rows)) > 1 for cut in verdict.cuts if cut.decides)  # never cut evenly alone
    assert {weights.counted for weights in verdict.weights} == {1.0}
    assert all(cut.error < 1e-13 for cut in verdict.cuts if cut.precision == "float64")
    coarse = kind in ("autocast", "bf16")
    assert all(cut.error < (2e-2 if coarse else 3e-6) for cut in verdict.cuts if cut.precision == "own")


def test_a_batch_with_an_attention_mask_is_cut_by_tokens_too_and_that_does_not_decide():
    torch.manual_seed(0)
    model, objective, batch, _ = sorts()["GPT-2"]()
    verdict = verify(model, objective, batch)
    (by_tokens,) = [cut for cut in verdict.cuts if cut.name == "by tokens"]
    assert by_tokens.micro_batches > 1
    assert not by_tokens.decides
    assert batch["input_ids"].shape[1] == LENGTH
