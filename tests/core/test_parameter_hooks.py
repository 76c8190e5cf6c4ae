"""Hooks on parameters would be called once per micro-batch: they are refused by name, and those of DDP and FSDP are not."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from anybatch import Accumulator, Coupled, Update, UpdateError, info_nce, supervised, verify
from tests.reference import relative_error, whole_batch_gradient
from tests.setups import cross_entropy, labelled

rows = partial(labelled, 12, width=5)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def halve_if_large(gradient: Tensor) -> Tensor:
    return gradient / 2 if gradient.norm() > 0.1 else gradient


def sharpen(gradient: Tensor) -> Tensor:
    return gradient * gradient.norm()


def accumulated(model: nn.Module, micro_batch: int = 4) -> nn.Module:
    Accumulator(model, supervised(nn.CrossEntropyLoss()), micro_batch=micro_batch).backward(rows())
    return model


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter_is_refused_by_name_before_anything_runs(register):
    model = network()
    getattr(model[2].weight, register)(halve_if_large)
    with pytest.raises(UpdateError, match=rf"'2\.weight' has a hook \({register}: halve_if_large\).*call 3 times"):
        accumulated(model)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_verify_refuses_it_too_because_its_copies_would_lose_it():
    model = network()
    model[2].weight.register_hook(sharpen)
    with pytest.raises(UpdateError, match=r"'2\.weight' has a hook"):
        verify(model, supervised(nn.CrossEntropyLoss()), rows())


def test_the_way_out_is_exact_and_the_hook_was_not():
    reference = network()
    handle = reference[2].weight.register_hook(sharpen)
    cross_entropy(reference, rows()).backward()
    wanted = torch.cat([parameter.grad.flatten() for parameter in reference.parameters()])
    handle.remove()
    model = accumulated(network())
    model[2].weight.grad = sharpen(model[2].weight.grad)
    assert relative_error(model, wanted) <= 1e-12
    hooked = network()
    hooked[2].weight.register_hook(sharpen)
    for part in zip(*(column.split(4) for column in rows()), strict=True):
        (cross_entropy(hooked, part) / 3).backward()
    assert relative_error(hooked, wanted) > 0.05


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_an_optimizer_that_steps_in_backward_is_refused():
    from torch.distributed.optim import _apply_optimizer_in_backward

    by_hook, by_torch = network(), network()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in by_hook.parameters()}
    for parameter in by_hook.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: optimizers[parameter].step())
    _apply_optimizer_in_backward(torch.optim.SGD, by_torch.parameters(), {"lr": 0.1})
    for model, how in ((by_hook, "register_post_accumulate_grad_hook"), (by_torch, "an optimizer in backward: SGD")):
        with pytest.raises(UpdateError, match=rf"'0\.weight' has a hook \({how}.*cannot accumulate"):
            accumulated(model)


def test_it_is_seen_in_a_coupled_loss_and_on_its_own_parameters():
    objective = Coupled(lambda model, batch: (model(batch[0]), model(batch[0] + 1)), info_nce(0.1, learned=True))
    objective.parameters()[0].register_hook(halve_if_large)
    with pytest.raises(UpdateError, match=r"parameter shape \(\) has a hook"):
        Accumulator(network(), objective, micro_batch=4).backward(rows())


def test_it_is_seen_in_a_compiled_model_and_when_it_comes_late():
    model = network()
    compiled = torch.compile(model, backend="eager")
    update = Update(
        compiled, torch.optim.SGD(model.parameters(), lr=0.1), supervised(nn.CrossEntropyLoss()), micro_batch=4
    )
    assert update(rows()).applied
    handle = model[0].bias.register_hook(halve_if_large)
    with pytest.raises(UpdateError, match=r"'_orig_mod\.0\.bias' has a hook"):
        update(rows())
    handle.remove()
    assert update(rows()).applied


def test_a_batch_that_is_one_micro_batch_calls_a_hook_once_as_it_is_meant_to_be():
    model, twin = network(), network()
    for each in (model, twin):
        each[2].weight.register_hook(sharpen)
    cross_entropy(twin, rows()).backward()
    accumulated(model, micro_batch=12)
    assert torch.equal(model[2].weight.grad, twin[2].weight.grad)


def test_hooks_of_torchs_own_wrappers_are_let_through():
    def reduce(module: nn.Module, gradient: Tensor) -> None:
        pass

    reduce.__module__ = "torch.nn.parallel.distributed"
    model = network()
    reference = whole_batch_gradient(model, cross_entropy, rows())
    model[0].weight.register_hook(partial(reduce, model))
    assert relative_error(accumulated(model), reference) <= 1e-12
    twin = copy.deepcopy(network())
    reduce.__module__ = "my.distributed"
    twin[0].weight.register_hook(partial(reduce, twin))
    with pytest.raises(UpdateError, match=r"'0\.weight' has a hook"):
        accumulated(twin)
