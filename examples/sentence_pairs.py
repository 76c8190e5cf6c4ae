"""sentence-transformers: `exact(SentenceTransformerTrainer)`. Match titles and texts of Python's own help.

python examples/sentence_pairs.py [updates]
"""

import sys
import tempfile
from pydoc_data.topics import topics

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from anybatch.integrations.huggingface import exact


def main(updates: int = 30) -> float:
    """Train; return the last logged loss. Each text is compared with all 64 of an update."""
    pairs = [text.strip().split("\n\n", 2)[:2] for text in topics.values() if text.count("\n\n") > 2]
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(
        (text for pair in pairs for text in pair), trainers.WordLevelTrainer(special_tokens=["<unk>"])
    )
    model = SentenceTransformer(modules=[StaticEmbedding(words, embedding_dim=32)], device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        args = SentenceTransformerTrainingArguments(
            folder, use_cpu=True, max_steps=updates, per_device_train_batch_size=8, gradient_accumulation_steps=8,
            learning_rate=5e-2, logging_steps=updates, report_to="none", disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        trainer = exact(SentenceTransformerTrainer)(  # was: SentenceTransformerTrainer(
            model,
            args,
            train_dataset=Dataset.from_dict(
                {"title": [pair[0] for pair in pairs], "text": [pair[1] for pair in pairs]}
            ),
            loss=MultipleNegativesRankingLoss(model),
        )
        trainer.train()
    return float(trainer.state.log_history[0]["loss"])


if __name__ == "__main__":
    print(f"loss of the last updates: {main(*map(int, sys.argv[1:])):.3f}")
