"""Micro-batches of no units on one rank alone: their rows are in the metrics, and no rank waits for another."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from anybatch import Accumulator, Objective, Sum, Update, supervised
from tests.parallel.test_engines import branched
from tests.parallel.wrapped import BOTH, Wrap, difference, labelled, largest, network, own
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


def only_without_units() -> list[bool]:
    """The branch is used by rows of rank 0 that have no target; the second batch is one that is proven to fit."""
    model, (inputs, targets) = branched()
    targets[:2] = -100
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    accumulator = Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=2)
    for _ in range(2):
        wrapped.zero_grad()
        accumulator.backward(own((inputs, targets), [8, 8]))
    gradients = [model.branch.weight.grad, model.never.weight.grad]
    return [gradient is not None and not gradient.any() for gradient in gradients]


def test_parameters_that_only_rows_without_units_use_have_zeros_on_every_rank_and_others_none():
    assert on_ranks(2, only_without_units) == [[True, False], [True, False]]
