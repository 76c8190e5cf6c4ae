"""Supervised fine-tuning, preferences and rewards of TRL on tiny models: rows, trainers, and the loss of a whole batch."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

from benchmarks.tiny_models import llama, preference_loss, texts
from benchmarks.trainers import Handed, arguments

WORDS = [f"w{number}" for number in range(50)]


def tokenizer() -> Any:
    model = Tokenizer(
        models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2} | {w: i for i, w in enumerate(WORDS) if i > 2}, "<pad>")
    )
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def words(row: dict[str, Tensor]) -> str:
    return " ".join(WORDS[token] for token in row["input_ids"])


def fitted(
    cls: type,
    config: type,
    rows: list[dict[str, Any]],
    model: nn.Module,
    folder: Any,
    resume: Any = None,
    **options: Any,
) -> Any:
    handed = Handed()
    usual = {"max_length": None, "gradient_checkpointing": False, "bf16": False}
    trainer = cls(
        model,
        args=arguments(str(folder), config, **usual | options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        callbacks=[handed],
        **({"ref_model": llama()} if issubclass(cls, trl.DPOTrainer) else {}),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, handed


def batches_of(trainer: Any, size: int = 12) -> list[Any]:
    rows = list(trainer.train_dataset)
    return [trainer.data_collator(rows[start : start + size]) for start in range(0, len(rows), size)]


def completion_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def reward_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    chosen, rejected = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0].chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def scorer() -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForSequenceClassification(copy.deepcopy(llama(num_labels=1).config))


PROMPTS = [
    {"prompt": words(one) + " ", "completion": words(other)}
    for one, other in zip(texts(19, 3), texts(19, 4), strict=True)
]
PAIRS = [
    {"prompt": words(one) + " ", "chosen": words(good), "rejected": words(bad)}
    for one, good, bad in zip(texts(19, 3), texts(19, 4), texts(19, 5), strict=True)
]
SFT = (trl.SFTTrainer, trl.SFTConfig, PROMPTS, llama, completion_loss)
DPO = (trl.DPOTrainer, trl.DPOConfig, PAIRS, llama, preference_loss)
REWARD = (trl.RewardTrainer, trl.RewardConfig, PAIRS, scorer, reward_loss)
