"""Rows of unequal length: what the mean divides by is tokens, and no two micro-batches have as many."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from anybatch import huggingface, supervised
from benchmarks.models import TokenModel
from benchmarks.table.case import Case, later
from benchmarks.table.cases.rows import cross_entropy

IGNORED = -100
VOCABULARY = 50


def cases() -> list[Case]:
    llama = ragged_llama()
    return [
        llama,
        replace(llama, name="ragged tokens, GPT-2", model=later(gpt2)),
        ragged_own_model(),
        replace(llama, name="a micro-batch with no target, Llama", rows=with_a_gap(llama)),
        bert_classifier(),
        replace(llama, name="two ranks, ragged tokens, Llama", ranks=2),
    ]


def texts(num_rows: int, seed: int) -> list[Tensor]:
    """Log-normal lengths from 4 to 80, tokens above 0."""
    torch.manual_seed(seed)
    lengths = torch.empty(num_rows).log_normal_(2.5, 1.0).clamp(4, 80).long()
    return [torch.randint(1, VOCABULARY, (int(length),)) for length in lengths]


def pad(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch as transformers' models take it."""
    ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    labels = pad_sequence([row["labels"] for row in rows], batch_first=True, padding_value=IGNORED)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The causal loss; transformers' own rounds logits to fp32 on the way."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])["logits"]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss that the model computes of itself."""
    loss: Tensor = model(**batch)["loss"]
    return loss


def ragged_llama() -> Case:
    return Case(
        name="ragged tokens, Llama",
        rows=[{"input_ids": text, "labels": text} for text in texts(128, seed=4)],
        model=later(llama),
        loss=own_loss,
        precise_loss=next_token_loss,
        objective=huggingface(),
        collate=pad,
        batch=32,
        micro_batch=4,
    )


def llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    import transformers

    torch.manual_seed(5)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def with_a_gap(case: Case) -> list[dict[str, Tensor]]:
    """The second micro-batch of every batch has nothing but ignored targets, such as prompts without an answer."""
    size, rows = case.micro_batch, []
    for number, row in enumerate(case.rows):
        is_gap = number % case.batch // size == 1
        rows.append(row | {"labels": torch.full_like(row["labels"], IGNORED)} if is_gap else row)
    return rows


def ragged_own_model() -> Case:
    """A model of one's own, whose loss is written next to it."""
    rows = [(text[:-1], text[1:]) for text in texts(128, seed=6)]

    def collate(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        tokens = pad_sequence([row[0] for row in rows], batch_first=True)
        return tokens, pad_sequence([row[1] for row in rows], batch_first=True, padding_value=IGNORED)

    return Case(
        name="ragged tokens, a model of one's own",
        rows=rows,
        model=later(lambda: TokenModel(VOCABULARY)),
        loss=cross_entropy,
        objective=supervised(nn.CrossEntropyLoss()),
        collate=collate,
        batch=32,
        micro_batch=4,
    )


def bert() -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3, pad_token_id=0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def bert_classifier() -> Case:
    """A head of transformers that takes `**kwargs`; every micro-batch is full, so that even a mean of means is right."""
    torch.manual_seed(7)
    ids, labels = torch.randint(1, VOCABULARY, (256, 12)), torch.randint(0, 3, (256,))
    rows: list[dict[str, Any]] = [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": label}
        for row, label in zip(ids, labels, strict=True)
    ]
    return Case(
        name="full micro-batches, Bert classifier",
        rows=rows,
        model=later(bert),
        loss=own_loss,
        objective=huggingface(),
        batch=64,
        micro_batch=16,
    )
