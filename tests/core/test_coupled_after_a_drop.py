"""A coupled loss from which a micro-batch was dropped: the batch is what is left, as if the rest had never been there."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Accumulated, Accumulator, Coupled, MicroBatches, info_nce
from tests.reference import gradient

pytestmark = pytest.mark.filterwarnings("ignore:the forward changes buffers of its own")

SIZES = (3, 2, 4, 3)
"""Ragged on purpose."""


class Poisoned(torch.autograd.Function):
    """Finite forward, nan backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.nan


class Counting(nn.Module):
    """A moving average that is written to in place and a counter that is assigned anew, both buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros((), dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.average.mul_(0.9).add_(0.1 * x.detach().mean())
        self.count = self.count + 1
        return x + 0.1 * self.count


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.4), Counting(), nn.Linear(6, 5)).double()


def encode(model: nn.Module, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    queries, keys = model(pair[0]), model(pair[1])
    return queries, Poisoned.apply(keys) if pair[1].amax() > 1e3 else keys


def pairs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    queries, keys = (torch.randn(sum(SIZES), 4, generator=generator, dtype=torch.float64) for _ in range(2))
    return queries, keys


def spoilt(kind: str) -> tuple[Tensor, Tensor]:
    """The second and the last micro-batch are not finite: in what they encode to, or in the gradient alone."""
    queries, keys = pairs()
    for row in (SIZES[0] + 1, sum(SIZES) - 1):
        keys[row] = torch.nan if kind == "representations" else 1e6
    return queries, keys


def cut(batch: tuple[Tensor, Tensor], indices: tuple[int, ...] = (0, 1, 2, 3)) -> list[tuple[Tensor, Tensor]]:
    parts = list(zip(*(column.split(SIZES) for column in batch), strict=True))
    return [parts[index] for index in indices]


class Run:
    """One batch through a fresh model, and all that it left."""

    def __init__(self, batch: tuple[Tensor, Tensor], **options: Any) -> None:
        self.model = encoder()
        self.loss = info_nce(0.3, learned=True).double()
        self.result: Accumulated = Accumulator(
            self.model,
            Coupled(encode, self.loss),
            micro_batch=2,
            batch_norm="micro",
            drop_nonfinite=True,
            **options,
        ).backward(MicroBatches(cut(batch)))
        self.gradient = gradient([*self.model.parameters(), *self.loss.parameters()])
        self.buffers = copy.deepcopy(dict(self.model.named_buffers()))
        self.next_draw = torch.rand(3)


class Reference:
    """The rows that are left, each micro-batch normalised by itself, one loss and one backward, by hand."""

    def __init__(self, batch: tuple[Tensor, Tensor], indices: tuple[int, ...]) -> None:
        model, loss = encoder(), info_nce(0.3, learned=True).double()
        norm = model[1]
        seen: list[list[Tensor]] = [[], []]
        norm.register_forward_hook(lambda module, args, output: seen[int(len(seen[0]) > len(seen[1]))].append(args[0]))
        encoded = [encode(model, part) for part in cut(batch, indices)]
        value = loss(tuple(torch.cat(column) for column in zip(*encoded, strict=True)))
        value.backward()
        self.loss = value.item()
        self.gradient = gradient([*model.parameters(), *loss.parameters()])
        self.counting = model[3]
        self.next_draw = torch.rand(3)
        # queries then keys: two calls of the layer in one forward are two updates, each of all rows
        self.mean, self.var = torch.zeros(6).double(), torch.ones(6).double()
        for calls in seen:
            values = torch.cat(calls).detach()
            self.mean = 0.9 * self.mean + 0.1 * values.mean(0)
            self.var = 0.9 * self.var + 0.1 * values.var(0)


KINDS = ["representations", "gradient"]


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_are_those_of_the_rows_that_are_left_with_the_masks_that_they_alone_would_draw(kind):
    run, wanted = Run(spoilt(kind)), Reference(pairs(), (0, 2))
    assert (run.result.dropped, run.result.units) == ((1, 3), 7)
    assert float(run.result.loss) == pytest.approx(wanted.loss, rel=1e-12)
    assert torch.allclose(run.gradient, wanted.gradient, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_random_draws_go_on_as_if_the_dropped_rows_had_never_run(kind):
    run, wanted = Run(spoilt(kind)), Reference(pairs(), (0, 2))
    assert torch.equal(run.next_draw, wanted.next_draw)
    assert not torch.equal(run.next_draw, Reference(pairs(), (0, 1, 2, 3)).next_draw)


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_hold_nothing_of_the_dropped_rows_nor_of_the_attempt_they_spoilt(kind):
    run, wanted = Run(spoilt(kind)), Reference(pairs(), (0, 2))
    assert int(run.buffers["3.count"]) == 4, "two calls each of two micro-batches"
    assert torch.equal(run.buffers["3.average"], wanted.counting.average)
    assert int(run.buffers["1.num_batches_tracked"]) == 2
    assert torch.allclose(run.buffers["1.running_mean"], wanted.mean, rtol=1e-12)
    assert torch.allclose(run.buffers["1.running_var"], wanted.var, rtol=1e-12)


def test_the_loss_of_all_rows_and_that_of_the_rows_that_are_left_are_not_the_same():
    every, some = Reference(pairs(), (0, 1, 2, 3)), Reference(pairs(), (0, 2))
    assert every.loss != pytest.approx(some.loss, rel=0.05)
    assert float((every.gradient - some.gradient).norm()) > 0.1 * float(some.gradient.norm())


def test_gradients_from_before_stay_and_those_of_the_dropped_attempt_do_not():
    model, loss = encoder(), info_nce(0.3, learned=True).double()
    parameters = [*model.parameters(), *loss.parameters()]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    accumulator = Accumulator(model, Coupled(encode, loss), micro_batch=2, batch_norm="micro", drop_nonfinite=True)
    accumulator.backward(MicroBatches(cut(spoilt("gradient"))))
    assert torch.allclose(gradient(parameters), Reference(pairs(), (0, 2)).gradient + 1, rtol=1e-10)


def test_a_loss_that_is_not_finite_over_finite_representations_is_nobodys_and_drops_all():
    """Without its last rows it would be finite, and its gradient is: none of that says whose it is."""
    model = nn.Linear(3, 2)
    coupled = Coupled(
        lambda model, x: model(x), lambda outputs: outputs.sum() + (torch.inf if len(outputs) > 4 else 0.0)
    )
    result = Accumulator(model, coupled, micro_batch=2, drop_nonfinite=True).backward(torch.ones(5, 3))
    assert (result.dropped, result.units, result.has_gradient) == ((0, 1, 2), 0, False)
    assert result.loss.isnan()
    assert not gradient(model.parameters()).any()
