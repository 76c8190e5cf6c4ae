"""The graph of one micro-batch is gone before the next forward: the measured peak does not grow with their number."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Accumulator, Coupled, Mean, Objective, PerRow, Sum, Update, Window
from tests.core.live_storages import LiveStorages, peak_of

WIDTH = 1024
UNIT = 2 * WIDTH * 4
"""Bytes of one activation of a micro-batch of two rows."""
HELD = 16
"""How many activations a graph holds for as long as it lives, whether or not backward has run through it."""


class Holding(torch.autograd.Function):
    """Keeps its activations on the node, where backward does not free them: only the end of the graph does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.held = x.repeat(HELD, 1)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1


class Scaled(nn.Module):
    """Two numbers to learn, and activations as wide as the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.offset = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return Holding.apply(x * self.scale + self.offset)


def batch_of(micro_batches: int) -> Tensor:
    return torch.randn(2 * micro_batches, WIDTH, generator=torch.Generator().manual_seed(micro_batches))


def alone(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def mean_squared(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """On the CPU the mean lies in the memory of all its elements, which a loss that is kept would keep."""
    means = [nn.functional.mse_loss(model(x), x) for _ in range(5)]
    return means[0], {
        "bare": means[1],
        "mean": Mean(means[2]),
        "sum": Sum(means[3]),
        "rows": PerRow(means[4].repeat(2)),
    }


def with_metrics(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Every metric has a graph of its own that no backward pass frees."""
    output = model(x)
    sides = [Holding.apply(output) for _ in range(4)]
    metrics = {
        "bare": sides[0].mean(),
        "mean": Mean(sides[1].mean(), units=3),
        "sum": Sum(sides[2].sum()),
        "rows": PerRow(sides[3].mean(1)),
    }
    return output.square().mean(), metrics


def mostly_nan(model: nn.Module, x: Tensor) -> Tensor:
    """Not finite but for the last micro-batch: no backward pass frees what these graphs hold."""
    output = model(x)
    return output.square().mean() + (torch.nan if x[0, 0] > 0 else 0.0)


def accumulate(x: Tensor, loss: Any = alone, **options: Any) -> Any:
    return Accumulator(Scaled(), Objective(loss), micro_batch=2, **options).backward(x)


def accumulate_dropping(x: Tensor) -> None:
    x = x.clone()
    x[:, 0] = 1.0
    x[-2:, 0] = -1.0
    assert accumulate(x, mostly_nan, drop_nonfinite=True).dropped == tuple(range(len(x) // 2 - 1))


def accumulate_observed(x: Tensor) -> None:
    accumulate(x, with_metrics, observer=lambda event: None)


def update(x: Tensor) -> None:
    model = Scaled()
    Update(model, torch.optim.SGD(model.parameters(), lr=0.1), Objective(with_metrics), micro_batch=2)(x)


def window(x: Tensor) -> None:
    model = Scaled()
    with Window(model.parameters()) as passes:
        for part in x.split(2):
            passes.backward(mean_squared(model, part)[0])
    assert passes.micro_batches == len(x) // 2


def coupled(x: Tensor) -> None:
    objective = Coupled(
        lambda model, part: model(part).mean(1), lambda means: (means.var(), {"size": means.abs().sum()})
    )
    Accumulator(Scaled(), objective, micro_batch=2).backward(x)


WAYS = {
    "loss": accumulate,
    "loss and metrics": lambda x: accumulate(x, with_metrics),
    "mean squared": lambda x: accumulate(x, mean_squared),
    "dropped": accumulate_dropping,
    "observed": accumulate_observed,
    "update": update,
    "window": window,
    "coupled": coupled,
}


@pytest.mark.parametrize("way", WAYS)
def test_the_peak_of_many_micro_batches_is_that_of_one(way):
    peaks = []
    for micro_batches in (1, 2, 9):
        x = batch_of(micro_batches)
        # the copy with marks that one of the ways makes is as large as the batch, and no graph
        peaks.append(peak_of(lambda x=x: WAYS[way](x), [x]) - (x.nbytes if way == "dropped" else 0))
    assert peaks[0] > HELD * UNIT, "the meter sees what the graph holds"
    assert max(peaks) < peaks[0] + 4 * UNIT, [peak / UNIT for peak in peaks]


def test_a_loss_that_somebody_holds_makes_the_peak_grow():
    held: list[Tensor] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        held.append(alone(model, x))
        return held[-1]

    peaks = []
    for micro_batches in (1, 2, 9):
        held.clear()
        x = batch_of(micro_batches)
        peaks.append(peak_of(lambda x=x: accumulate(x, loss), [x]))
    assert peaks[1] > peaks[0] + 0.9 * HELD * UNIT
    assert peaks[2] > peaks[0] + 8 * 0.9 * HELD * UNIT


@pytest.mark.parametrize("way", ["loss and metrics", "window", "coupled"])
def test_nothing_of_a_graph_is_alive_in_what_is_returned(way):
    x = batch_of(3)
    ways = {
        "loss and metrics": lambda: accumulate(x, with_metrics),
        "coupled": lambda: Accumulator(
            Scaled(),
            Coupled(lambda model, part: model(part).mean(1), lambda m: (m.var(), {"size": m.sum()})),
            micro_batch=2,
        ).backward(x),
        "window": lambda: _window(x),
    }
    with LiveStorages([x]) as storages:
        result = ways[way]()
        assert storages.live < UNIT, storages.live / UNIT
    assert result.loss.grad_fn is None


def _window(x: Tensor) -> Window:
    model = Scaled()
    with Window(model.parameters()) as passes:
        for part in x.split(2):
            passes.backward(alone(model, part))
    return passes


def test_gradients_that_were_summed_are_the_whole_batchs_all_the_same():
    x = batch_of(5)
    model, twin = Scaled(), Scaled().double()
    Accumulator(model, Objective(with_metrics), micro_batch=2).backward(x)
    (x.double() * twin.scale + twin.offset).square().mean().backward()
    for mine, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        assert float(mine.grad) == pytest.approx(float(wanted.grad), rel=1e-5)
