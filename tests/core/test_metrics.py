"""Metrics: numbers without a graph, and means over nothing that spoil nothing."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Accumulator, Coupled, Mean, Objective, PerRow, Sum

KINDS = {
    "bare": lambda values: values.mean(),
    "Mean": lambda values: Mean(values.mean()),
    "Mean over its own units": lambda values: Mean(values.mean(), units=len(values)),
    "Sum": lambda values: Sum(values.sum()),
    "PerRow": lambda values: PerRow(values),
}


def errors_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean(1)


def whole(values: Tensor, kind: str) -> Tensor:
    return {"PerRow": values, "Sum": values.sum()}.get(kind, values.mean())


@pytest.mark.parametrize("kind", KINDS)
def test_a_metric_with_a_graph_comes_out_without_one(kind):
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(7, 3)

    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        errors = errors_of(model, x)
        assert errors.requires_grad
        return errors.mean(), {"error": KINDS[kind](errors)}

    metric = Accumulator(model, Objective(loss), micro_batch=3).backward(x).metrics["error"]
    assert (metric.grad_fn, metric.requires_grad) == (None, False)
    assert torch.allclose(metric.double(), whole(errors_of(model, x).detach().double(), kind), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_metric_of_a_coupled_loss_comes_out_without_a_graph(kind):
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(7, 3)

    def loss(outputs: Tensor) -> tuple[Tensor, dict[str, Any]]:
        errors = outputs.square().mean(1)
        assert errors.requires_grad
        return errors.var(), {"error": KINDS[kind](errors)}

    coupled = Coupled(lambda model, part: model(part), loss)
    metric = Accumulator(model, coupled, micro_batch=3).backward(x).metrics["error"]
    assert (metric.grad_fn, metric.requires_grad) == (None, False)
    assert torch.allclose(metric.double(), whole(errors_of(model, x).detach().double(), kind), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_metric_over_exact_batch_norm_comes_out_without_a_graph(kind):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), torch.randn(7, 3)

    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        errors = errors_of(model, x)
        return errors.mean(), {"error": KINDS[kind](errors)}

    accumulator = Accumulator(model, Objective(loss), micro_batch=3, batch_norm="exact")
    metric = accumulator.backward(x).metrics["error"]
    assert (metric.grad_fn, metric.requires_grad) == (None, False)
    assert torch.allclose(metric.double(), whole(errors_of(model, x).detach().double(), kind), rtol=1e-4)


def test_units_of_a_mean_that_have_a_graph_leave_none_in_the_metric():
    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        weights = model(x).sigmoid()
        return weights.mean(), {"error": Mean(1.0, units=weights.sum())}

    metric = Accumulator(nn.Linear(3, 1), Objective(loss), micro_batch=2).backward(torch.randn(4, 3)).metrics["error"]
    assert metric.grad_fn is None


def labelled(*targets: int) -> tuple[Tensor, Tensor]:
    return torch.randn(len(targets), 4, generator=torch.Generator().manual_seed(5)), torch.tensor(targets)


def accuracy(model: nn.Module, part: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Any]]:
    """A mean over the rows with a target: nan where a micro-batch has none."""
    logits, counted = model(part[0]), part[1] != -100
    correct = (logits.argmax(1) == part[1])[counted].float()
    half = correct.mean().bfloat16()
    return F.cross_entropy(logits, part[1]), {
        "bare": correct.mean(),
        "own units": Mean(correct.mean(), units=counted.sum()),
        "own number": Mean(correct.mean(), units=int(counted.sum())),
        "bf16": half,
        "rows": Sum(len(counted)),
    }


ACCURACY = Objective(accuracy, units=lambda part: (part[1] != -100).sum())


def test_the_nan_of_a_micro_batch_of_no_units_does_not_make_the_whole_nan():
    torch.manual_seed(1)
    model, batch = nn.Linear(4, 2), labelled(0, 1, -100, -100, 1, -100, 0, 0)
    counted = batch[1] != -100
    wanted = float((model(batch[0]).argmax(1) == batch[1])[counted].double().mean())
    assert 0 < wanted < 1
    metrics = Accumulator(model, ACCURACY, micro_batch=2).backward(batch).metrics
    for name in ("bare", "own units", "own number", "bf16"):
        assert float(metrics[name]) == pytest.approx(wanted, rel=1e-6), name
    assert float(metrics["rows"]) == 8
    parts = [accuracy(model, (x, y))[1]["bare"] for x, y in zip(*(part.split(2) for part in batch), strict=True)]
    assert torch.stack(parts).mean().isnan(), "the plain mean of them is"


def test_a_micro_batch_of_no_units_runs_for_its_metrics_alone_and_without_a_graph():
    ran: list[tuple[int, bool]] = []

    def loss(model: nn.Module, part: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        ran.append((int((part[1] != -100).sum()), torch.is_grad_enabled()))
        return accuracy(model, part)

    objective = Objective(loss, units=ACCURACY.units)
    Accumulator(nn.Linear(4, 2), objective, micro_batch=2).backward(labelled(0, 1, -100, -100, 1, -100))
    assert sorted(ran) == [(0, False), (1, True), (2, True)]


def test_the_nan_of_a_micro_batch_that_has_units_is_not_hidden():
    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return model(x).mean(), {"bad": torch.tensor(torch.nan if x[0, 0] > 0 else 1.0)}

    metrics = (
        Accumulator(nn.Linear(1, 1), Objective(loss), micro_batch=1).backward(torch.tensor([[-1.0], [1.0]])).metrics
    )
    assert metrics["bad"].isnan()


def test_a_mean_over_no_units_at_all_is_nan_and_sums_are_counted():
    metrics = Accumulator(nn.Linear(4, 2), ACCURACY, micro_batch=2).backward(labelled(-100, -100, -100, -100)).metrics
    for name in ("bare", "own units", "own number", "bf16"):
        assert metrics[name].isnan(), name
    assert float(metrics["rows"]) == 4


def test_metrics_in_bf16_are_averaged_in_fp32():
    values = torch.tensor([1.0, 1.0 + 2**-7, 1.0, 1.0 + 2**-7, 1.0])

    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return model(x).mean(), {"value": x.mean().bfloat16()}

    metric = Accumulator(nn.Linear(1, 1), Objective(loss), micro_batch=1).backward(values[:, None]).metrics["value"]
    assert metric.dtype is torch.float32
    assert float(metric) == pytest.approx(float(values.double().mean()), rel=1e-6)
    assert float(values.bfloat16().sum() / 5) != pytest.approx(float(values.double().mean()), rel=1e-3)


def test_rows_that_were_dropped_are_nan_and_the_others_at_their_own_place():
    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return model(x).mean(), {"row": PerRow(x[:, 0]), "whole": PerRow(x[:, 0].nan_to_num().long())}

    x = torch.tensor([[1.0], [2.0], [torch.nan], [4.0], [5.0]])
    result = Accumulator(nn.Linear(1, 1), Objective(loss), micro_batch=2, drop_nonfinite=True).backward(x)
    assert result.dropped == (1,)
    for name in ("row", "whole"):
        assert torch.equal(result.metrics[name].isnan(), torch.tensor([False, False, True, True, False])), name
        assert result.metrics[name][[0, 1, 4]].tolist() == [1.0, 2.0, 5.0]


def test_rows_that_were_dropped_from_a_coupled_loss_are_nan_too():
    x = torch.tensor([[1.0], [2.0], [torch.nan], [4.0], [5.0]])
    coupled = Coupled(lambda model, x: (model(x), x), lambda seen: (seen[0].sum(), {"row": PerRow(seen[1][:, 0])}))
    result = Accumulator(nn.Linear(1, 1), coupled, micro_batch=2, drop_nonfinite=True).backward(x)
    assert result.dropped == (1,)
    assert torch.equal(result.metrics["row"].nan_to_num(0.0), torch.tensor([1.0, 2.0, 0.0, 0.0, 5.0]))
