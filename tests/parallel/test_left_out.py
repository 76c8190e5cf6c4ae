"""Micro-batches of no units on one rank alone: their rows are in the metrics, and no rank waits for another."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from anybatch import Accumulator, Objective, Sum, Update, row_dropout, supervised
from anybatch.core import own_part
from tests.parallel.test_engines import branched
from tests.parallel.wrapped import BOTH, Wrap, difference, fsdp, hsdp, labelled, largest, network, own
from tests.processes.ranks import on_ranks


def loss(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Any:
    return F.cross_entropy(model(rows[0]), rows[1]), {"seen": Sum(len(rows[1]))}


def num_targets(rows: tuple[Tensor, Tensor]) -> Tensor:
    return (rows[1] != -100).sum()


def trained(wrap: Wrap) -> dict[str, float]:
    """Rank 0 has two micro-batches without a target, rank 1 has none; three updates, and the whole batch at once."""
    inputs, targets = labelled(16)
    targets[2:6] = -100
    batch = (inputs.double(), targets)
    twin = network(torch.float64)
    model = wrap(copy.deepcopy(twin))
    update = Update(
        model, torch.optim.SGD(model.parameters(), lr=0.5), Objective(loss, num_targets), micro_batch=2, check="off"
    )
    alone = torch.optim.SGD(twin.parameters(), lr=0.5)
    for _ in range(3):
        result = update(own(batch, [8, 8]))
        alone.zero_grad()
        loss(twin, batch)[0].backward()
        alone.step()
    return {"error": difference(model, twin), "rows": float(result.metrics["seen"]) - 16, "units": result.units - 12}


@BOTH
def test_rows_without_units_are_in_the_metrics_and_the_next_updates_are_those_of_the_whole_batch(wrap):
    told = on_ranks(2, trained, wrap)
    assert largest(told, "error") < 1e-14
    assert largest(told, "rows") == largest(told, "units") == 0


def ddp_unused(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


def only_without_units(wrap: Wrap) -> dict[str, float]:
    """The branch is used by rows of rank 0 that have no target; zeros, unlike None, let its weights decay."""
    model, (inputs, targets) = branched()
    targets[:2] = -100
    batch = (inputs.double(), targets)
    twin = model.double()
    wrapped = wrap(copy.deepcopy(twin))
    update = Update(wrapped, decaying(wrapped), supervised(nn.CrossEntropyLoss()), micro_batch=2, check="off")
    alone = decaying(twin)
    for _ in range(3):
        update(own(batch, [8, 8]))
        alone.zero_grad()
        pairs = zip(*(column.split(2) for column in batch), strict=True)
        (sum(F.cross_entropy(twin(rows), labels, reduction="sum") for rows, labels in pairs) / 14).backward()
        alone.step()
    gradients = {name: parameter.grad for name, parameter in wrapped.named_parameters()}
    (branch,) = (gradient for name, gradient in gradients.items() if name.endswith("branch.weight"))
    (never,) = (gradient for name, gradient in gradients.items() if name.endswith("never.weight"))
    has_zeros = branch is not None and not own_part(branch).any()
    return {"error": difference(wrapped, twin), "branch": float(has_zeros), "never": float(never is not None)}


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = branched()[0], nn.Dropout(0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.drop(self.inner(inputs))
        return output


def with_masks_by_row() -> bool:
    inputs, targets = branched()[1]
    targets[:3] = -100
    model = hsdp(row_dropout(Masked()))
    Accumulator(model, supervised(nn.CrossEntropyLoss()), micro_batch=3).backward(own((inputs, targets), [8, 8]))
    return model.inner.branch.weight.grad is not None


def test_masks_by_row_know_the_rows_of_another_rank():
    assert on_ranks(2, with_masks_by_row) == [True, True]


def decaying(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1)


@pytest.mark.parametrize("wrap", [ddp_unused, fsdp, hsdp])
def test_parameters_that_only_rows_without_units_use_have_zeros_on_every_rank_and_others_none(wrap):
    told = on_ranks(2, only_without_units, wrap)
    assert [(one["branch"], one["never"]) for one in told] == [(1, 0), (1, 0)]
    assert largest(told, "error") < 1e-14
