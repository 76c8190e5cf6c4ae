"""The scaler: `on_nonfinite="drop"` leaves an overflow to it, and memory may run out in any part of its work."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Accumulator, Coupled, MemoryLimitError, Objective, Update, supervised
from tests.injection import OutOfMemoryAt
from tests.reference import gradient

OVERFLOWS = 2.0**126
"""A scale under which gradients of about 1 are finite in fp32, and those of about 100 are not."""


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def spread(outputs: Tensor) -> Tensor:
    return outputs.square().mean() + outputs.var()


OBJECTIVES = {
    "plain": (lambda: nn.Linear(3, 1), Objective(squares), None),
    "coupled": (lambda: nn.Linear(3, 1), Coupled(lambda model, x: model(x), spread), None),
    "exact BatchNorm": (
        lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)),
        Objective(lambda model, x: 1000 * squares(model, x)),
        "exact",
    ),
}


def make(way: str, *, scale: float | None, on_nonfinite: str = "drop", **options: Any) -> Update:
    torch.manual_seed(0)
    make_model, objective, batch_norm = OBJECTIVES[way]
    model = make_model()
    return Update(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        objective,
        micro_batch=2,
        on_nonfinite=on_nonfinite,
        batch_norm=batch_norm,
        scaler=None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000),
        **options,
    )


def ragged_batch() -> Tensor:
    """Five rows in three micro-batches, the second of which has the large gradients."""
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    x[2:4] *= 30
    return x


def places_of_the_gradient(update: Update, batch: Tensor) -> set[int]:
    """Where in memory the gradient of the first parameter was added up, looked at after each backward pass."""
    seen: list[Tensor] = []
    parameter = next(update.model.parameters())

    def look(parameter: nn.Parameter) -> None:
        seen.append(parameter.grad)  # alive: no place twice

    look.__module__ = "anybatch.meters"  # the user's own hooks are refused
    parameter.register_post_accumulate_grad_hook(look)
    update(batch)
    assert len(seen) >= 3
    return {grad.data_ptr() for grad in seen}


@pytest.mark.parametrize("way", ["plain", "coupled"])
def test_with_a_scaler_no_second_set_of_gradients_is_made(way):
    assert len(places_of_the_gradient(make(way, scale=2.0**4), ragged_batch())) == 1


@pytest.mark.parametrize("way", ["plain", "coupled"])
def test_without_one_every_micro_batch_has_its_own_until_it_is_known_to_be_finite(way):
    assert len(places_of_the_gradient(make(way, scale=None), ragged_batch())) > 1


@pytest.mark.parametrize("way", OBJECTIVES)
def test_an_overflow_skips_the_update_and_halves_the_scale_until_all_rows_are_learnt_from(way):
    update, twin = make(way, scale=OVERFLOWS), make(way, scale=None, on_nonfinite="raise")
    batch = ragged_batch()
    skipped = 0
    while not (result := update(batch)).applied:
        skipped += 1
        assert result.dropped == ()
        assert update.scaler.get_scale() == OVERFLOWS / 2**skipped
        assert all(map(torch.equal, update.model.state_dict().values(), twin.model.state_dict().values()))
    assert skipped >= 1
    assert (result.dropped, result.units) == ((), 5)
    twin(batch)
    assert torch.allclose(gradient(update.parameters()), gradient(twin.parameters()), rtol=1e-5, atol=1e-7)
    for mine, wanted in zip(update.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.allclose(mine, wanted, rtol=1e-5, atol=1e-7)


def test_leaving_the_overflowing_rows_out_would_give_another_gradient():
    batch = ragged_batch()
    all_rows, some = make("plain", scale=None), make("plain", scale=None)
    all_rows(batch)
    some(batch[[0, 1, 4]])
    assert not torch.allclose(gradient(all_rows.parameters()), gradient(some.parameters()), rtol=0.5)


@pytest.mark.parametrize("way", ["plain", "coupled"])
def test_a_loss_that_is_nan_by_itself_is_dropped_with_a_scaler_too(way):
    batch = ragged_batch()
    batch[3] = torch.nan
    update, twin = make(way, scale=2.0**4), make(way, scale=None)
    result = update(batch)
    twin(batch[[0, 1, 4]])
    assert (result.applied, result.dropped, result.units) == (True, (1,), 3)
    assert update.scaler.get_scale() == 2.0**4
    assert torch.allclose(gradient(update.parameters()), gradient(twin.parameters()), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("way", OBJECTIVES)
def test_where_every_micro_batch_is_dropped_the_scaler_is_told_nothing(way):
    update = make(way, scale=2.0**4)
    before = copy.deepcopy(update.model.state_dict())
    for _ in range(2):
        result = update(torch.full((5, 3), torch.nan))
        assert (result.applied, result.dropped) == (False, (0, 1, 2))
    assert update.scaler.get_scale() == 2.0**4
    assert all(map(torch.equal, update.model.state_dict().values(), before.values()))
    assert update(ragged_batch()).applied


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip", "drop", "ignore"])
def test_finite_gradients_whose_norm_overflows_halve_the_scale_too(on_nonfinite):
    """Every element fits into fp32, the root of the sum of their squares does not: the scaler sees no inf by itself."""
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    objective = Objective(lambda model, x: 3e38 * model(x).mean())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    update = Update(model, optimizer, objective, micro_batch=2, on_nonfinite=on_nonfinite, scaler=scaler)
    result = update(torch.ones(5, 3))
    assert model.weight.grad.isfinite().all()
    assert (result.applied, result.dropped) == (False, ())
    assert not model.weight.any()
    assert scaler.get_scale() == 0.5


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip", "drop", "ignore"])
def test_an_overflow_is_skipped_whatever_is_asked_of_what_is_not_finite(on_nonfinite):
    update = make("plain", scale=OVERFLOWS, on_nonfinite=on_nonfinite)
    before = update.model.weight.detach().clone()
    assert not update(ragged_batch()).applied
    assert torch.equal(update.model.weight, before)
    assert update.scaler.get_scale() == OVERFLOWS / 2


def test_a_scaler_that_is_switched_off_is_none():
    update, twin = make("plain", scale=None), make("plain", scale=None)
    model = update.model
    off = torch.amp.GradScaler("cpu", enabled=False)
    update = Update(model, update.optimizer, Objective(squares), micro_batch=2, on_nonfinite="drop", scaler=off)
    batch = ragged_batch()
    batch[3] = torch.inf
    assert update(batch).dropped == twin(batch).dropped == (1,)
    assert torch.equal(gradient(update.parameters()), gradient(twin.parameters()))


def test_what_is_left_of_a_sum_after_a_drop_is_the_sum_of_the_rest_not_scaled_up():
    torch.manual_seed(1)
    x = torch.randn(12, 3)
    x[6, 1] = torch.inf
    rest = x[[0, 1, 2, 3, 8, 9, 10, 11]]
    model = nn.Linear(3, 2)
    reference = copy.deepcopy(model).double()
    reference(rest.double()).square().sum().backward()
    summed = Objective(lambda model, rows: model(rows).square().sum(), reduction="sum")
    result = Accumulator(model, summed, micro_batch=4, drop_nonfinite=True).backward(x)
    assert result.dropped == (1,)
    torch.testing.assert_close(model.weight.grad.double(), reference.weight.grad, rtol=1e-5, atol=0)


def start() -> tuple[Update, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    model[2].double()
    model[1].register_forward_hook(lambda module, inputs, output: output.double())
    update = Update(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.1),
        supervised(nn.CrossEntropyLoss()),
        micro_batch=4,
        clip_norm=0.1,
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2),
        check="off",
    )
    return update, (torch.randn(4, 4), torch.randint(0, 3, (4,)))


def outcome(update: Update) -> list[torch.Tensor]:
    held = [value for state in update.optimizer.state.values() for value in state.values()]
    return [*update.model.state_dict().values(), *held, torch.tensor(update.scaler.get_scale())]


@pytest.mark.parametrize("num_before", [0, 2])
def test_one_out_of_memory_anywhere_ends_in_the_same_weights_state_and_scale_or_is_said_by_name(num_before):
    """Gradients of two dtypes are unscaled one after the other: half of them must not be unscaled twice."""
    update, batch = start()
    for _ in range(num_before):
        update(batch)
    with OutOfMemoryAt() as counting:
        update(batch)
    update(batch)
    expected = outcome(update)
    num_torn = num_given_again = 0
    for point in range(len(counting.seen)):
        update, batch = start()
        for _ in range(num_before):
            update(batch)
        before = outcome(update)
        said = ""
        try:
            with OutOfMemoryAt(point):
                update(batch)
        except MemoryLimitError as error:
            said = str(error)
        if "state is torn" in said:
            num_torn += 1
            continue
        if said:
            assert "while the gradients were" in said
            assert all(map(torch.equal, outcome(update), before))
            num_given_again += 1
            update(batch)
        update(batch)
        got = outcome(update)
        # a batch that starts again is cut smaller, and sums in another order
        is_close = [torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in zip(got, expected, strict=True)]
        assert all(is_close), (point, counting.seen[point])
    assert num_given_again > 0
    assert (num_torn > 0) == (num_before == 2)


class SecondUnscaling(OutOfMemoryAt):
    """Memory runs out where the gradients of the first dtype are unscaled, and those of the second are not."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += ["once"] if "unscale" in func.name() else []
        if len(self.seen) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return func(*args, **(kwargs or {}))


def test_the_usual_order_unscales_half_of_the_gradients_twice():
    update, batch = start()
    update.scaler.scale(update.model(batch[0]).sum()).backward()
    before = [parameter.grad.clone() for parameter in update.model.parameters()]
    second = SecondUnscaling()
    with pytest.raises(torch.OutOfMemoryError), second:
        update.scaler.unscale_(update.optimizer)
    update.scaler.unscale_(update.optimizer)
    ratios = [(was / now.grad).nanmean().item() for was, now in zip(before, update.model.parameters(), strict=True)]
    assert max(ratios) > 2 * min(ratios)


def test_memory_that_never_suffices_to_unscale_is_said_by_name_and_nothing_was_changed():
    update, batch = start()
    update(batch)
    before = copy.deepcopy(update.model.state_dict())

    class NoUnscaling(OutOfMemoryAt):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "unscale" in func.name():
                raise torch.OutOfMemoryError("CUDA out of memory")
            return func(*args, **(kwargs or {}))

    with (
        NoUnscaling(),
        pytest.raises(MemoryLimitError, match=r"while the gradients were unscaled .*as they were"),
    ):
        update(batch)
    assert all(torch.equal(before[name], value) for name, value in update.model.state_dict().items())
    assert update(batch).applied
