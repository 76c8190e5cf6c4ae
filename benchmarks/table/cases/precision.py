"""Parameters in bf16: what is added to a sum of two digits is lost."""

import torch
import torch.nn.functional as F
from torch import nn

from anybatch import supervised
from benchmarks.table.case import Case, later
from benchmarks.table.cases.rows import cross_entropy


def cases() -> list[Case]:
    return [bf16(64), bf16(256)]


def bf16(num_micro_batches: int) -> Case:
    torch.manual_seed(10)
    rows = 4 * num_micro_batches
    x, labels = torch.randn(rows, 64).bfloat16(), torch.randint(0, 10, (rows,))
    return Case(
        name=f"bf16, {num_micro_batches} micro-batches",
        rows=list(zip(x, labels, strict=True)),
        model=later(lambda: nn.Linear(64, 10).bfloat16()),
        loss=cross_entropy,
        precise_loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        objective=supervised(nn.CrossEntropyLoss()),
        batch=rows,
        micro_batch=4,
        limit=2.5e-3,
    )
