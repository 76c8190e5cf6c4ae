"""Rows that stand alone: tails, epochs, clipping, class weights, schedules, an inf."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import supervised
from benchmarks.table.case import Case, later

Pair = tuple[Tensor, Tensor]


def cases() -> list[Case]:
    tail, weighted = uneven_tail(), class_weights()
    return [
        tail,
        replace(tail, name="two epochs of them", epochs=2),
        replace(tail, name="clipping on the short tail", clip_norm=0.25),
        replace(tail, name="linear LR to 0 over 16 updates", is_scheduled=True),
        an_inf(),
        weighted,
        replace(tail, name="two ranks, 1,000 rows", ranks=2),
        replace(
            weighted, name="two ranks, class weights, 61 rows", rows=weighted.rows[:61], batch=32, ranks=2, kind="head"
        ),
    ]


def cross_entropy(model: nn.Module, batch: Pair, weight: Tensor | None = None) -> Tensor:
    """In fp32 at least, as autocast has it."""
    logits = model(batch[0])
    logits = logits.float() if logits.itemsize < 4 else logits
    return F.cross_entropy(logits, batch[1], None if weight is None else weight.to(logits.dtype))


def uneven_tail() -> Case:
    torch.manual_seed(0)
    x = torch.randn(1000, 10)
    return Case(
        name="1,000 rows = 15 x 64 + 40, by 16",
        rows=list(zip(x, (x.sum(1) > 0).long(), strict=True)),
        model=later(lambda: nn.Linear(10, 2)),
        loss=cross_entropy,
        objective=supervised(nn.CrossEntropyLoss()),
        batch=64,
        micro_batch=16,
    )


def an_inf() -> Case:
    """16 full batches, an inf in the sixth; a loss scale is on, so that the sixth has to be left out."""
    torch.manual_seed(1)
    x = torch.randn(1024, 10)
    labels = (x.sum(1) > 0).long()
    x[5 * 64 + 20, 3] = torch.inf
    return replace(
        uneven_tail(),
        name="an inf in one window of 16",
        rows=list(zip(x, labels, strict=True)),
        is_scheduled=True,
        is_scaled=True,
        left_out=(5,),
    )


def class_weights() -> Case:
    torch.manual_seed(2)
    weight = torch.tensor([0.2, 1.0, 20.0])
    classes = torch.multinomial(torch.tensor([0.6, 0.35, 0.05]), 256, replacement=True)
    return Case(
        name="class weights 0.2, 1, 20",
        rows=list(zip(torch.randn(256, 10), classes, strict=True)),
        model=later(lambda: nn.Linear(10, 3)),
        loss=lambda model, batch: cross_entropy(model, batch, weight),
        objective=supervised(nn.CrossEntropyLoss(weight)),
        batch=64,
        micro_batch=8,
    )
