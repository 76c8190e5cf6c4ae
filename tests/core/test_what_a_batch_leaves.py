"""What a batch leaves beside its gradient: its loss by units, running statistics without what was dropped, closed stages."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Accumulator, Objective, Update
from anybatch.core import events as telling


def ragged() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(length, 3) for length in (7, 2, 2, 1, 5)]


def test_the_loss_of_uneven_micro_batches_is_that_of_all_rows_at_once():
    rows = torch.cat(ragged())
    model = nn.Linear(3, 2)
    objective = Objective(lambda model, x: model(x).square().mean(), units=lambda x: x.shape[0] ** 2)
    sizes = [5, 4, 4, 4]
    result = Accumulator(model, objective, micro_batch=5).backward(rows)
    means = [model.double()(part.double()).square().mean().item() for part in rows.split(sizes)]
    model.float()
    units = [size**2 for size in sizes]
    wanted = sum(u * m for u, m in zip(units, means, strict=True)) / sum(units)
    assert float(result.loss) == pytest.approx(wanted, rel=1e-6)
    assert float(result.loss) != pytest.approx(sum(means) / 4, rel=1e-6), "the mean of means"


def test_running_statistics_of_an_instance_norm_do_not_hold_what_was_dropped():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.InstanceNorm1d(3, track_running_stats=True))
    batch = torch.randn(6, 2, 4)
    batch[2, 0, 1] = torch.inf
    objective = Objective(lambda model, x: model(x).square().mean() + x.mean())
    result = Accumulator(model, objective, micro_batch=2, drop_nonfinite=True).backward(batch)
    assert result.dropped == (1,)
    assert model[1].running_mean.isfinite().all()
    assert model[1].running_var.isfinite().all()


def test_a_batch_of_one_micro_batch_that_is_dropped_leaves_batch_norm_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    before = copy.deepcopy(model.state_dict())
    batch = torch.randn(4, 3)
    batch[1, 2] = torch.inf
    objective = Objective(lambda model, x: model(x).square().mean())
    result = Accumulator(model, objective, micro_batch=4, batch_norm="micro", drop_nonfinite=True).backward(batch)
    assert result.dropped == (0,)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_where_all_that_counts_is_dropped_rows_without_units_do_not_stand_in_for_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    before = copy.deepcopy(model.state_dict())
    batch = torch.randn(6, 3)
    batch[:4, 0] = torch.nan
    objective = Objective(lambda model, x: model(x).square().mean(), units=lambda x: float(x.isnan().any()) * len(x))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = Update(model, optimizer, objective, micro_batch=2, batch_norm="exact", on_nonfinite="drop")
    result = update(batch)
    assert not result.applied
    assert set(result.dropped) >= {0, 1}
    assert result.units == 0
    assert torch.isnan(result.loss)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_gradient_that_is_not_finite_through_exact_batch_norm_drops_the_whole_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    before = copy.deepcopy(model.state_dict())

    def steep(model: nn.Module, x: Tensor) -> Tensor:
        """Finite, with an infinite slope: the square root of 0, in rows that begin with 9."""
        outputs = model(x).square().mean()
        return outputs + (outputs - outputs.detach()).abs().sqrt() * (x[:, 0] == 9).any()

    batch = torch.randn(6, 3)
    batch[3, 0] = 9
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = Update(
        model, optimizer, Objective(steep), micro_batch=2, batch_norm="exact", on_nonfinite="drop", check=False
    )
    result = update(batch)
    assert (result.applied, result.dropped) == (False, (0, 1, 2))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_stage_that_an_exception_left_open_is_closed(monkeypatch):
    open_ranges: list[str] = []

    class Range:
        """Stands in for the profiler's range, and tells whether it is open."""

        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            open_ranges.append(self.name)

        def __exit__(self, *_: Any) -> None:
            open_ranges.remove(self.name)

    monkeypatch.setattr(telling, "record_function", Range)

    def fails(model: nn.Module, x: Tensor) -> Tensor:
        assert open_ranges
        raise ValueError("no loss today")

    accumulator = Accumulator(nn.Linear(3, 1), Objective(fails), micro_batch=2, observer=lambda event: None)
    with pytest.raises(ValueError, match="no loss today"):
        accumulator.backward(torch.randn(4, 3))
    assert open_ranges == []
