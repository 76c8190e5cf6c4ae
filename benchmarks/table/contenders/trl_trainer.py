"""TRL: supervised fine-tuning and preferences, by its own trainers and by the same made exact."""

import tempfile
from typing import Any

import trl
from datasets import Dataset
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.integrations.huggingface import exact
from benchmarks.table.case import Case
from benchmarks.table.contenders import Learnt
from benchmarks.table.contenders.hf_trainer import arguments, run
from benchmarks.tiny_models import llama
from benchmarks.trl_cases import WORDS, tokenizer

TRAINERS = {"SFT": (trl.SFTTrainer, trl.SFTConfig), "DPO": (trl.DPOTrainer, trl.DPOConfig)}


def learn(case: Case, model: nn.Module, optimizer: Optimizer) -> Learnt:
    return train(case, model, optimizer, lambda cls: cls)


def learn_exact(case: Case, model: nn.Module, optimizer: Optimizer) -> Learnt:
    return train(case, model, optimizer, exact)


def train(case: Case, model: nn.Module, optimizer: Optimizer, made: Any) -> Learnt:
    """With the class that `made` makes of TRL's."""
    cls, config = TRAINERS[case.kind]
    rows = [tokens_of(row) if case.kind == "SFT" else words_of(row) for row in case.rows]
    usual: dict[str, Any] = {"max_length": None, "gradient_checkpointing": False, "bf16": False}
    with tempfile.TemporaryDirectory() as folder:
        trainer = made(cls)(
            model,
            args=arguments(case, folder, config, **usual),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(),
            optimizers=(optimizer, None),
            **({"ref_model": llama()} if case.kind == "DPO" else {}),
        )
        return run(case, trainer)


def tokens_of(row: dict[str, Tensor]) -> dict[str, list[int]]:
    return {key: value.tolist() for key, value in row.items()}


def words_of(row: dict[str, Any]) -> dict[str, str]:
    """As text; TRL adds the token that ends it."""
    chosen, rejected = ([WORDS[token] for token in row[key][:-1]] for key in ("input_ids", "rejected"))
    start = row["prompt"]
    return {
        "prompt": " ".join(chosen[:start]) + " ",
        "chosen": " ".join(chosen[start:]),
        "rejected": " ".join(rejected[start:]),
    }
