"""What TRL trains: answers to prompts, and preferences between two answers. A schedule, windows of 12 rows, a tail of 7."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from anybatch import huggingface
from benchmarks.table.case import Case, later
from benchmarks.table.cases.heads import own_loss
from benchmarks.tiny_models import llama, next_token_loss, pad, preference_loss, texts

ROWS = 19
EOS = torch.tensor([2])
IGNORED = -100


def cases() -> list[Case]:
    alone = [answers(), preferences()]
    return [*alone, *(replace(case, name=f"two ranks, {case.name}", ranks=2) for case in alone)]


def answers() -> Case:
    pairs = zip(texts(ROWS, 3), texts(ROWS, 4), strict=True)
    rows = [asked(prompt["input_ids"], answer["input_ids"]) for prompt, answer in pairs]
    return Case(
        name="SFT, a tail of 7",
        kind="SFT",
        rows=rows,
        model=later(llama),
        loss=own_loss,
        precise_loss=next_token_loss,
        objective=huggingface(),
        collate=pad,
        batch=12,
        micro_batch=3,
        is_scheduled=True,
        are_weights_seen=False,
        limit=1e-6,
    )


def asked(prompt: Tensor, answer: Tensor) -> dict[str, Tensor]:
    labels = torch.cat([torch.full_like(prompt, IGNORED), answer, EOS])
    return {"input_ids": torch.cat([prompt, answer, EOS]), "labels": labels}


def preferences() -> Case:
    triples = zip(texts(ROWS, 3), texts(ROWS, 4), texts(ROWS, 5), strict=True)
    parts = [[part["input_ids"] for part in triple] for triple in triples]
    rows = [
        {
            "input_ids": torch.cat([prompt, chosen, EOS]),
            "rejected": torch.cat([prompt, bad, EOS]),
            "prompt": len(prompt),
        }
        for prompt, chosen, bad in parts
    ]
    return replace(
        answers(),
        name="DPO, a tail of 7",
        kind="DPO",
        rows=rows,
        loss=preference_loss,
        precise_loss=None,
        collate=chosen_over_rejected,
    )


def chosen_over_rejected(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The chosen answers with their prompts, and below all of them the rejected ones."""
    ids = pad_sequence([row[key] for key in ("input_ids", "rejected") for row in rows], batch_first=True)
    mask = (ids > 0).long()
    starts = torch.tensor([row["prompt"] for row in [*rows, *rows]])[:, None]
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "completion_mask": mask * (torch.arange(ids.shape[1]) >= starts),
    }
