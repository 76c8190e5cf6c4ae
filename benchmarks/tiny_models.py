"""Tiny language models, rows for them, and losses that are written next to them. Loads no trainer, which takes seconds."""

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

VOCABULARY = 50


def llama(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=64, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert(num_labels: int = 3) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=num_labels, pad_token_id=0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def texts(count: int, seed: int = 1) -> list[dict[str, Tensor]]:
    """Rows of 3 to 29 tokens, all of them targets."""
    torch.manual_seed(seed)
    found = [torch.randint(3, VOCABULARY, (int(length),)) for length in torch.randint(3, 30, (count,))]
    return [{"input_ids": text, "labels": text} for text in found]


def classified(count: int, seed: int = 2) -> list[dict[str, Tensor]]:
    """Rows of 6 tokens in one of 3 classes, the last of them rare."""
    torch.manual_seed(seed)
    classes = torch.multinomial(torch.tensor([0.6, 0.3, 0.1]), count, replacement=True)
    return [{"input_ids": torch.randint(3, VOCABULARY, (6,)), "labels": label} for label in classes]


def pad(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    if rows[0]["labels"].dim() == 0:
        labels = torch.stack([row["labels"] for row in rows])
    else:
        labels = pad_sequence([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])["logits"]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def class_loss(model: nn.Module, batch: dict[str, Tensor], weight: Tensor | None = None) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])["logits"]
    return F.cross_entropy(logits, batch["labels"], None if weight is None else weight.to(logits.dtype))


def log_probs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].log_softmax(-1)
    chosen = logits.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    return (chosen * batch["completion_mask"][:, 1:]).sum(1)


def preference_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """DPO's, of [chosen; rejected], against the model that training began with: `llama()`."""
    with torch.no_grad():
        before = log_probs(llama().to(next(model.parameters()).dtype), batch).chunk(2)
    now = log_probs(model, batch).chunk(2)
    return -F.logsigmoid(0.1 * ((now[0] - before[0]) - (now[1] - before[1]))).mean()
