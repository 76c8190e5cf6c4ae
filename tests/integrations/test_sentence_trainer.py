"""SentenceTransformerTrainer: the window is one contest, in which every anchor meets every positive."""

import pytest
from sentence_transformers import SentenceTransformerTrainer
from sentence_transformers.sentence_transformer import losses

from anybatch import LossError
from anybatch.integrations.huggingface import exact
from benchmarks.sentence_cases import error_of, fitted


def test_in_batch_negatives_are_those_of_the_whole_window(tmp_path):
    _, handed = fitted(exact(SentenceTransformerTrainer), losses.MultipleNegativesRankingLoss, tmp_path)
    assert error_of(handed) <= 6e-6


def test_sentence_transformers_alone_takes_those_of_each_batch(tmp_path):
    _, handed = fitted(SentenceTransformerTrainer, losses.MultipleNegativesRankingLoss, tmp_path)
    assert error_of(handed) > 0.1


def test_a_loss_that_cuts_by_itself_names_its_plain_sister(tmp_path):
    with pytest.raises(LossError, match="Give MultipleNegativesRankingLoss"):
        fitted(exact(SentenceTransformerTrainer), losses.CachedMultipleNegativesRankingLoss, tmp_path)
