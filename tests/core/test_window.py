from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import LossError, UnitsError, Window, WindowError
from tests.reference import gradient, relative_error, whole_batch_gradient


def regression(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def test_equal_weights_for_unequal_passes_do_not():
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 1).double(), torch.randn(9, 3).double(), torch.randn(9, 1).double()
    reference = whole_batch_gradient(model, regression, (x, y))
    with Window(model.parameters()) as window:
        for part in zip(x.split([8, 1]), y.split([8, 1]), strict=True):
            window.backward(regression(model, part))
    assert relative_error(model, reference) > 0.1


def test_what_grad_held_before_is_added_to_and_not_rescaled():
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = held = torch.tensor([10.0, 20.0])
    with Window([weight]) as window:
        window.backward((weight * 1.0).sum(), units=1)
        window.backward((weight * 4.0).sum(), units=3)
    assert weight.grad is held
    assert held.tolist() == [13.25, 23.25]


def test_an_exception_leaves_the_gradients_as_they_were():
    weight, fresh = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    weight.grad = held = torch.tensor([10.0, 20.0])
    with pytest.raises(RuntimeError, match="the data ran out"), Window([weight, fresh]) as window:
        window.backward((weight * fresh + weight).sum(), units=5)
        raise RuntimeError("the data ran out")
    assert weight.grad is held
    assert held.tolist() == [10.0, 20.0]
    assert fresh.grad is None


class DiesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError("no memory left")


def half_made_loss(first: nn.Parameter, second: nn.Parameter) -> torch.Tensor:
    """The gradient of `second` arrives before the pass dies on its way to `first`."""
    return (DiesInBackward.apply(first) * 2 + second).sum()


def test_a_torn_pass_that_was_caught_inside_is_not_passed_over_in_silence():
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    with pytest.raises(WindowError, match="died half-way"), Window([first, second]) as window:
        window.backward((first + second).sum())
        with pytest.raises(MemoryError):
            window.backward(half_made_loss(first, second))
    assert first.grad is None
    assert second.grad is None


def test_a_dropped_pass_that_dies_half_way_adds_nothing():
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    with Window([first, second], drop_nonfinite=True) as window:
        window.backward((first + 3 * second).sum(), units=2)
        with pytest.raises(MemoryError):
            window.backward(half_made_loss(first, second), units=2)
    assert first.grad.tolist() == [1.0, 1.0]
    assert second.grad.tolist() == [3.0, 3.0]


def test_passes_that_are_not_finite_are_dropped_and_the_rest_renormalised():
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 1).double(), torch.randn(12, 3).double(), torch.randn(12, 1).double()
    good = [(x[:5], y[:5]), (x[9:], y[9:])]
    reference = whole_batch_gradient(model, regression, (torch.cat([x[:5], x[9:]]), torch.cat([y[:5], y[9:]])))
    bad = (x[5:9] * torch.inf, y[5:9])
    with Window(model.parameters(), drop_nonfinite=True) as window:
        kept = [window.backward(regression(model, part), len(part[0])) for part in (good[0], bad, good[1])]
    assert kept == [True, False, True]
    assert window.dropped == 1
    assert relative_error(model, reference) < 1e-12


def test_a_finite_loss_with_a_gradient_that_is_not_is_dropped_too():
    weight = nn.Parameter(torch.zeros(1))
    with Window([weight], drop_nonfinite=True) as window:
        window.backward((weight * 2).sum())
        window.backward(weight.sqrt().sum())
    assert weight.grad.tolist() == [2.0]
    assert window.dropped == 1


def test_a_pass_of_no_units_is_left_out_even_if_its_loss_is_nan():
    weight = nn.Parameter(torch.ones(1))
    with Window([weight]) as window:
        assert not window.backward((weight * 0).sum() / 0.0, units=0)
        assert window.backward((weight * 3).sum(), units=torch.tensor(2))
    assert weight.grad.tolist() == [3.0]
    assert window.loss == 3.0


def test_frozen_and_repeated_parameters_are_no_trouble():
    shared, frozen = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1), requires_grad=False)
    with Window([shared, shared, frozen]) as window:
        window.backward((shared * frozen).sum(), units=4)
        window.backward((shared * 3).sum(), units=4)
    assert shared.grad.tolist() == [2.0]
    assert frozen.grad is None


def test_a_window_of_no_passes_changes_nothing():
    weight = nn.Parameter(torch.ones(1))
    with Window([weight]) as window:
        pass
    assert weight.grad is None
    assert (window.units, float(window.loss)) == (0, 0.0)


def test_a_window_serves_one_block():
    weight = nn.Parameter(torch.ones(1))
    with Window([weight]) as window:
        window.backward((weight * 3).sum())
    with pytest.raises(WindowError, match="was entered before"), window:
        pass
    assert weight.grad.tolist() == [3.0]


def test_windows_nest_in_low_precision_too():
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    with Window([weight]) as outer:
        outer.backward((weight * 2).sum())
        with Window([weight]) as inner:
            inner.backward((weight * 4).sum())
    assert weight.grad.tolist() == [6.0]
    assert weight.grad.dtype == torch.bfloat16


def test_misuse_is_named():
    with pytest.raises(WindowError, match=r"give model\.parameters\(\)"):
        Window(nn.Linear(1, 1))
    with pytest.raises(LossError, match=r"is a float: 3\.0"), Window([nn.Parameter(torch.ones(1))]) as window:
        window.backward(3.0)
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(WindowError, match="not open"):
        Window([weight]).backward(weight.sum())
    with pytest.raises(UnitsError, match=r"units=-1"), Window([weight]) as window:
        window.backward(weight.sum(), units=-1)
    with pytest.raises(LossError, match=r"shape \(2,\); expected one number"), Window([weight]) as window:
        window.backward(weight * 2)


def test_gradients_are_summed_in_fp32_for_bf16_parameters():
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    with Window([weight]) as window:
        for index in range(512):
            window.backward((weight * (1.0 if index else 256.0)).sum().float())
    assert weight.grad.dtype == torch.bfloat16
    assert gradient([weight]).item() == pytest.approx((256 + 511) / 512, rel=2**-8)
    weight.grad = None
    for index in range(512):
        (weight * (1.0 if index else 256.0) / 512).sum().float().backward()
    assert gradient([weight]).item() < 1.2, "the plain sum in bf16 stops growing"


Listed = Callable[[nn.Module, nn.Module], Iterable[nn.Parameter]]


def six_times_off(parameters: Listed) -> tuple[Tensor, Tensor]:
    """The gradient of a head that a window may list or not, and the unit-weighted mean that it should be."""
    torch.manual_seed(0)
    body, head = nn.Linear(4, 4).double(), nn.Linear(4, 1).double()
    x, sizes = torch.randn(7, 4).double(), [1, 6]
    with Window(parameters(body, head)) as window:
        for part in x.split(sizes):
            window.backward(head(body(part)).square().mean(), units=len(part))
    seen = head.weight.grad.clone()
    head.weight.grad = None
    head(body(x)).square().mean().backward()
    return seen, head.weight.grad


def test_a_head_that_is_not_listed_is_refused_before_its_backward():
    with pytest.raises(WindowError, match=r"a parameter of shape \(1, 4\) that is not among the 2 .*head\.parameters"):
        six_times_off(lambda body, head: body.parameters())


def test_listed_it_is_the_mean():
    seen, wanted = six_times_off(lambda body, head: [*body.parameters(), *head.parameters()])
    assert float((seen - wanted).norm() / wanted.norm()) <= 1e-12


def test_not_rescaled_it_would_be_far_off(monkeypatch):
    monkeypatch.setattr(Window, "_check_leaves", lambda self, loss: None)
    seen, wanted = six_times_off(lambda body, head: body.parameters())
    assert float((seen - wanted).norm() / wanted.norm()) > 3


def test_an_input_that_requires_a_gradient_is_refused_and_frozen_parameters_are_not():
    model, x = nn.Linear(4, 1), torch.randn(3, 4, requires_grad=True)
    model.bias.requires_grad_(False)
    with Window(model.parameters()) as window:
        assert window.backward(model(x.detach()).mean(), units=3)
    with pytest.raises(WindowError, match=r"a tensor of shape \(3, 4\)"), Window(model.parameters()) as window:
        window.backward(model(x).mean(), units=3)
