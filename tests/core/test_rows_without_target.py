"""Rows without a target do to the model what they do in the whole batch: zeros for what only they use, and statistics."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Accumulator, Objective, Update
from tests.reference import gradient, relative_error


class TwoHeads(nn.Module):
    """The first column says which head a row takes; a micro-batch without rows for a head does not call it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 5)
        self.heads = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])
        self.unused = nn.Linear(2, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y, which = self.body(x).tanh(), (x[:, 0] > 0).long()
        out = y.new_zeros(len(x), 3)
        for number, head in enumerate(self.heads):
            if (which == number).any():
                out = out.index_put(((which == number).nonzero()[:, 0],), head(y[which == number]))
        return out


def rows() -> tuple[Tensor, Tensor]:
    """Twelve rows; the second four take the second head, and have no target."""
    torch.manual_seed(1)
    x, y = torch.randn(12, 6).double(), torch.randint(0, 3, (12,))
    x[:, 0] = -1.0
    x[4:8, 0] = 1.0
    y[4:8] = -100
    return x, y


def masked_mean(model: nn.Module, batch: Any) -> Tensor:
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return losses.sum() / (batch[1] != -100).sum()  # 0/0 in a micro-batch without any target, and so is its gradient


def with_a_metric(model: nn.Module, batch: Any) -> Any:
    return masked_mean(model, batch), {"rows": float(len(batch[0]))}


def targets(batch: Any) -> Tensor:
    return (batch[1] != -100).sum()


OBJECTIVES = {"bare": Objective(masked_mean, targets), "with a metric": Objective(with_a_metric, targets)}


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_a_head_that_only_they_use_gets_zeros_and_steps_as_in_the_whole_batch(kind):
    model = TwoHeads()
    wanted = copy.deepcopy(model)
    masked_mean(wanted, rows()).backward()
    torch.optim.AdamW(wanted.parameters(), lr=0.1, weight_decay=0.5).step()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    Update(model, optimizer, OBJECTIVES[kind], micro_batch=4)(rows())
    for (name, mine), (_, its) in zip(model.named_parameters(), wanted.named_parameters(), strict=True):
        assert (mine.grad is None) == (its.grad is None), name
        assert torch.allclose(mine, its, rtol=0, atol=1e-12), name
    assert not model.heads[1].weight.grad.any()
    assert model.unused.weight.grad is None


def test_without_zeros_weight_decay_passes_it_by():
    model = TwoHeads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    before = model.heads[1].weight.detach().clone()
    for part in (slice(0, 4), slice(8, 12)):
        (masked_mean(model, tuple(column[part] for column in rows())) / 2).backward()
    optimizer.step()
    assert torch.equal(model.heads[1].weight, before)


def test_they_do_not_run_where_every_parameter_has_its_gradient():
    model = nn.Linear(6, 3).double()
    ran: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        ran.append(int(targets(batch)))
        return masked_mean(model, batch)

    Accumulator(model, Objective(loss, targets), micro_batch=4).backward(rows())
    assert ran == [4, 4]


def test_a_batch_without_any_target_leaves_zeros_in_all_that_its_rows_use():
    model, (x, y) = TwoHeads(), rows()
    Accumulator(model, OBJECTIVES["bare"], micro_batch=4).backward((x, torch.full_like(y, -100)))
    assert not any(parameter.grad.any() for head in (model.body, *model.heads) for parameter in head.parameters())
    assert model.unused.weight.grad is None


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_they_are_in_the_running_statistics_whether_a_metric_is_reported_or_not(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    wanted = copy.deepcopy(model)
    masked_mean(wanted, rows())
    Accumulator(model, OBJECTIVES[kind], micro_batch=4, batch_norm="micro").backward(rows())
    assert torch.allclose(model[0].running_mean, wanted[0].running_mean, rtol=0, atol=1e-12)
    assert torch.allclose(model[0].running_var, wanted[0].running_var, rtol=0, atol=1e-12)
    assert model[0].num_batches_tracked == 1
    x, y = rows()
    counted = nn.BatchNorm1d(6).double()
    counted(x[y != -100])
    assert not torch.allclose(model[0].running_mean, counted.running_mean, rtol=0, atol=1e-3)


def test_the_gradient_is_the_whole_batchs():
    model = TwoHeads()
    wanted = copy.deepcopy(model)
    masked_mean(wanted, rows()).backward()
    Accumulator(model, OBJECTIVES["bare"], micro_batch=5).backward(rows())
    assert relative_error(model, gradient(wanted.parameters())) <= 1e-12
