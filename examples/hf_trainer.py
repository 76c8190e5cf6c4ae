"""Hugging Face Trainer: `exact(Trainer)` in place of `Trainer`. A small BERT classifies digits, read as 64 tokens.

python examples/hf_trainer.py [updates]
"""

import sys
import tempfile

import torch
import transformers
from sklearn.datasets import load_digits

from anybatch.integrations.huggingface import exact


def main(updates: int = 40) -> float:
    """Train; return the last logged loss, a mean over whole batches."""
    images, labels = load_digits(return_X_y=True)
    tokens = torch.tensor(images).long() + 1
    rows = [{"input_ids": image, "labels": int(label)} for image, label in zip(tokens, labels, strict=True)]
    config = transformers.BertConfig(
        vocab_size=18, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder, use_cpu=True, max_steps=updates, per_device_train_batch_size=16, gradient_accumulation_steps=4,
            learning_rate=3e-3, logging_steps=updates, report_to="none", disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        trainer = exact(transformers.Trainer)(model, args, train_dataset=rows)  # was: transformers.Trainer(...)
        trainer.train()
    return float(trainer.state.log_history[0]["loss"])


if __name__ == "__main__":
    print(f"loss of the last updates: {main(*map(int, sys.argv[1:])):.3f}")
