"""Heads of transformers as the frameworks are given them: windows of 12 rows, 3 at a time, and a tail of 7."""

from typing import Any

import peft
import torch
from torch import Tensor, nn

from anybatch import huggingface
from benchmarks.heads import HEADS, Rows, collate
from benchmarks.table.case import Case

ROWS = 19


def cases() -> list[Case]:
    """18 heads, and one with adapters."""
    found = [case(head.model, head.make(), head.rows(ROWS), has_batch_norm=head.has_batch_norm) for head in HEADS]
    llama = HEADS[0]
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_dropout=0.0, init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    return [*found, case(f"{llama.model}, LoRA", peft.get_peft_model(llama.make(), config), llama.rows(ROWS))]


def case(name: str, model: nn.Module, rows: Rows, *, has_batch_norm: bool = False) -> Case:
    return Case(
        name=name,
        kind="head",
        rows=rows,
        model=model,
        loss=own_loss,
        objective=huggingface(),
        collate=collate,
        batch=12,
        micro_batch=3,
        are_rows_coupled=has_batch_norm,
        limit=1e-6,
    )


def own_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The loss that the model computes of itself; some heads do so in fp32 whatever their weights."""
    loss: Tensor = model(**batch)["loss"]
    return loss
