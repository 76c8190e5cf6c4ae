"""Heads of transformers as the frameworks are given them: windows of 12 rows, 3 at a time, and a tail of 7."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from anybatch import huggingface
from benchmarks.heads import HEADS, Rows, collate
from benchmarks.table.case import Case, later

ROWS = 19


def cases() -> list[Case]:
    """18 heads, and one with adapters."""
    found = [case(head.model, head.make, head.rows(ROWS), has_batch_norm=head.has_batch_norm) for head in HEADS]
    return [*found, case(f"{HEADS[0].model}, LoRA", with_adapters, HEADS[0].rows(ROWS))]


def with_adapters() -> nn.Module:
    import peft

    config = peft.LoraConfig(r=4, lora_dropout=0.0, init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    model: nn.Module = peft.get_peft_model(HEADS[0].make(), config)
    return model


def case(name: str, make: Callable[[], nn.Module], rows: Rows, *, has_batch_norm: bool = False) -> Case:
    return Case(
        name=name,
        kind="head",
        rows=rows,
        model=later(make),
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
