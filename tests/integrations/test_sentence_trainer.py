"""SentenceTransformerTrainer: the window is one contest, in which every anchor meets every positive."""

import pytest
import torch
from sentence_transformers import SentenceTransformerTrainer
from sentence_transformers.sentence_transformer import losses

from anybatch import LossError
from anybatch.integrations.huggingface import exact
from benchmarks.sentence_cases import error_of, fitted, static_encoder


def test_in_batch_negatives_are_those_of_the_whole_window(tmp_path):
    _, handed = fitted(exact(SentenceTransformerTrainer), losses.MultipleNegativesRankingLoss, tmp_path)
    assert error_of(handed) <= 6e-6


def test_sentence_transformers_alone_takes_those_of_each_batch(tmp_path):
    _, handed = fitted(SentenceTransformerTrainer, losses.MultipleNegativesRankingLoss, tmp_path)
    assert error_of(handed) > 0.1


def test_a_loss_that_cuts_by_itself_names_its_plain_sister(tmp_path):
    with pytest.raises(LossError, match="Give MultipleNegativesRankingLoss"):
        fitted(exact(SentenceTransformerTrainer), losses.CachedMultipleNegativesRankingLoss, tmp_path)


def test_a_killed_run_resumes_bit_for_bit(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1, "num_train_epochs": 2, "optim": "adamw_torch"}
    ended = []
    for resume in (None, str(tmp_path / "checkpoint-3")):
        cls, loss = exact(SentenceTransformerTrainer), losses.MultipleNegativesRankingLoss
        trainer, _ = fitted(cls, loss, tmp_path, make=static_encoder, resume=resume, **saving)
        ended.append(trainer.model.state_dict())
    assert all(torch.equal(value, ended[1][name]) for name, value in ended[0].items())
