"""A batch that starts again, or is looked at twice, leaves what it would have left in one go."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from anybatch import Accumulator, Coupled, MicroBatches, NonFiniteError, Objective, Update
from tests.injection import OutOfMemoryAbove, OutOfMemoryAt
from tests.reference import gradient

pytestmark = pytest.mark.filterwarnings("ignore:the forward changes buffers of its own")


class Queue(nn.Module):
    """A coupled loss with a memory of its own: it remembers representations and counts its calls, in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("remembered", torch.zeros(2))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, outputs: Tensor) -> Tensor:
        loss = (outputs - self.remembered).square().mean() + outputs.var()
        self.remembered.mul_(0.5).add_(outputs.detach().mean(0))
        self.num_calls = self.num_calls + 1
        return loss


class Draws(nn.Module):
    """Noise, a moving average that is written to in place, and a table that is assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(2))
        self.register_buffer("table", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.average.lerp_(x.detach().mean(0), 0.1)
        self.table = self.table + self.average
        return x * torch.rand_like(x) + self.table


def model_of_draws() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), Draws())


def everything(model: nn.Module, *more: nn.Module) -> list[Tensor]:
    held = [*model.state_dict().values(), *(value for one in more for value in one.state_dict().values())]
    return [*(value.clone() for value in held), gradient(model.parameters()), torch.get_rng_state()]


def rows(seed: int = 1, count: int = 8) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))


OBJECTIVES = {
    "plain": lambda: (Objective(lambda model, x: model(x).square().mean()), []),
    "coupled": lambda: (lambda queue: (Coupled(lambda model, x: model(x), queue), [queue]))(Queue()),
}


@pytest.mark.parametrize("way", OBJECTIVES)
def test_buffers_of_the_model_and_of_the_loss_are_put_back_wherever_memory_runs_out(way):
    batch, earlier = rows(), rows(2, count=2)

    def run(mode: OutOfMemoryAt, micro_batch: int) -> tuple[int, list[Tensor]]:
        model = model_of_draws()
        objective, more = OBJECTIVES[way]()
        accumulator = Accumulator(model, objective, micro_batch=micro_batch, batch_norm="micro")
        accumulator.backward(earlier)  # which buffers move is known from here on
        model.zero_grad()
        with mode:
            result = accumulator.backward(batch)
        assert result.micro_batches == (4 if result.retries else 8 // micro_batch)
        return result.micro_batches, everything(model, *more)

    # memory that runs out while copies are made, before the first forward, does not make micro-batches smaller
    counting = OutOfMemoryAt()
    expected = dict([run(counting, 4), run(OutOfMemoryAt(), 2)])
    assert not all(map(torch.equal, *expected.values())), "another cut draws and counts otherwise"
    ran = [run(OutOfMemoryAt(point), 4) for point in range(len(counting.seen))]
    for point, (micro_batches, got) in enumerate(ran):
        assert all(map(torch.equal, got, expected[micro_batches])), (point, counting.seen[point])
    assert sum(micro_batches == 4 for micro_batches, _ in ran) > 0.5 * len(ran)


def test_memory_that_runs_out_as_bf16_gradients_are_handed_over_counts_nothing_twice():
    def run(mode: OutOfMemoryAt, micro_batch: int) -> tuple[int, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).bfloat16()
        objective = Objective(lambda model, x: model(x).float().square().mean())
        batch = rows().bfloat16()
        with mode:
            result = Accumulator(model, objective, micro_batch=micro_batch).backward(batch)
        return result.micro_batches, gradient(model.parameters())

    counting = OutOfMemoryAt()
    expected = dict([run(counting, 4), run(OutOfMemoryAt(), 2)])
    for point in range(len(counting.seen)):
        if "_to_copy" in counting.seen[point]:  # the last of these make the bf16 gradients
            micro_batches, got = run(OutOfMemoryAt(point), 4)
            assert torch.equal(got, expected[micro_batches]), point


def test_the_very_first_batch_can_start_again_too():
    def run(rows_that_fit: int, micro_batch: int) -> list[Tensor]:
        model, queue = model_of_draws(), Queue()
        objective = Coupled(lambda model, x: model(x), queue)
        with OutOfMemoryAbove(rows_that_fit):
            Accumulator(model, objective, micro_batch=micro_batch, batch_norm="micro").backward(rows())
        return everything(model, queue)

    assert all(map(torch.equal, run(2, 8), run(8, 2)))


def test_the_default_for_batch_norm_learns_what_micro_learns_and_draws_what_it_draws():
    """The first batch may be looked at twice for the warning; nothing of that is left."""

    def run(mode: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
        update = Update(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            Objective(lambda model, x: model(x).square().mean()),
            micro_batch=3,
            batch_norm=mode,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            update(rows())
            update(rows(2))
        return everything(model)

    assert all(map(torch.equal, run(None), run("micro")))


@pytest.mark.parametrize("spoilt", ["activations", "loss"])
def test_exact_batch_norm_after_a_drop_is_as_if_the_rows_had_never_been(spoilt):
    """Statistics, buffers, draws and gradients; found at the first BatchNorm, or not before the loss."""

    def run(parts: list[Tensor]) -> tuple[tuple[int, ...], list[Tensor]]:
        model = model_of_draws()

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            return model(x).square().mean() + (torch.inf if x[0, 0] == 100 else 0.0)

        accumulator = Accumulator(model, Objective(loss), micro_batch=2, batch_norm="exact", drop_nonfinite=True)
        return accumulator.backward(MicroBatches(parts)).dropped, everything(model)

    good, bad = [rows(seed, count) for seed, count in ((1, 3), (2, 2), (3, 4))], rows(4, 2)
    bad[0, 0] = torch.nan if spoilt == "activations" else 100.0
    dropped, got = run([good[0], bad, good[1], good[2], bad])
    assert dropped == (1, 4)
    *buffers, gradients, random = run(good)[1]
    assert all(map(torch.equal, got, buffers))
    assert torch.allclose(got[-2], gradients, rtol=1e-5, atol=1e-6)  # shares of 13 units, corrected at the close
    assert torch.equal(got[-1], random)
    bad[0, 0] = 0.0
    assert not all(map(torch.equal, run([*good, bad])[1], got))


@pytest.mark.parametrize("mode", ["micro", "exact", "frozen"])
def test_after_the_culprit_was_named_model_and_optimizer_are_as_they_were(mode):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    objective = Objective(lambda model, x: model(x).square().mean())
    update = Update(model, optimizer, objective, micro_batch=3, batch_norm=mode)
    update(rows())
    before = copy.deepcopy([*model.state_dict().values()])
    bad = rows(3)
    bad[4] = torch.inf
    with pytest.raises(NonFiniteError, match="first in micro-batch 1 of 3"):
        update(bad)
    assert all(map(torch.equal, model.state_dict().values(), before))
    assert all(not (p.grad is not None and p.grad_dtype not in (None, p.dtype)) for p in model.parameters())
    assert update(rows(4)).applied


def test_a_sum_runs_micro_batches_of_no_units_too():
    """Units of a sum weigh only its metrics: rows that no unit is counted for have a loss all the same."""
    x = rows()
    model = nn.Linear(3, 2)
    objective = Objective(lambda model, x: model(x).square().sum(), units=lambda x: x[0, 0].sign() + 1, reduction="sum")
    units = [float(objective.units(part)) for part in x.split(2)]
    assert 0.0 in units
    assert any(units)
    result = Accumulator(model, objective, micro_batch=2).backward(x)
    twin = copy.deepcopy(model).double()
    twin.zero_grad()
    loss = twin(x.double()).square().sum()
    loss.backward()
    assert float(result.loss) == pytest.approx(loss.item(), rel=1e-6)
    assert torch.allclose(gradient(model.parameters()), gradient(twin.parameters()), rtol=1e-5)


def test_a_learning_rate_that_is_a_tensor_is_reported_as_it_was_in_this_update():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    objective = Objective(lambda model, x: model(x).square().mean())
    update = Update(model, optimizer, objective, micro_batch=2, scheduler=scheduler)
    results = [update(rows()) for _ in range(3)]
    assert [float(result.lr) for result in results] == [0.5, 0.25, 0.125]


def test_a_loss_that_is_infinite_with_a_finite_gradient_is_dropped_too():
    x = rows(count=6)
    x[2, 0] = 100.0

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).mean() + (torch.inf if x[0, 0] == 100 else 0.0)

    model = nn.Linear(3, 1)
    result = Accumulator(model, Objective(loss), micro_batch=2, drop_nonfinite=True).backward(x)
    assert result.dropped == (1,)
    assert torch.allclose(model.weight.grad[0], x[[0, 1, 4, 5]].mean(0))
