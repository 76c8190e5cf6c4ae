"""Fused optimizers through `Update`: they are handed gradients in the dtype of the parameter, and step as all others do."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Accumulator, Objective, Update
from tests.reference import whole_batch_gradient

Make = Callable[..., torch.optim.Optimizer]
FUSED: dict[str, Make] = {
    "Adam": lambda groups, **options: torch.optim.Adam(groups, lr=0.01, weight_decay=0.1, **options),
    "AdamW": lambda groups, **options: torch.optim.AdamW(groups, lr=0.01, amsgrad=True, **options),
    "SGD": lambda groups, **options: torch.optim.SGD(groups, lr=0.1, **options),
    "SGD with momentum": lambda groups, **options: torch.optim.SGD(
        groups, lr=0.1, momentum=0.9, nesterov=True, **options
    ),
}
PRECISION = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    logits = model(batch[0])
    return F.cross_entropy(logits if logits.dtype is torch.float64 else logits.float(), batch[1], ignore_index=-100)


OBJECTIVE = Objective(classify, units=lambda batch: (batch[1] != -100).sum())


def case(dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Ragged: micro-batches of 3, 3, 3 and 2 rows, with 1, 2, 3 and 2 targets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    targets = torch.tensor([0, -100, -100, 1, 2, -100, 0, 1, 2, 2, 1])
    return model, (torch.randn(11, 6).to(dtype), targets)


def step_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    """The whole batch at once in float64, its gradient rounded once, and the step.

    By the same kernel: on the CPU torch 2.13's fused SGD leaves bf16 parameters as they are, but for the last few numbers.
    """
    flat = whole_batch_gradient(model, classify, batch)
    sizes = [parameter.numel() for parameter in model.parameters()]
    for parameter, values in zip(model.parameters(), flat.split(sizes), strict=True):
        parameter.grad = values.view_as(parameter).to(parameter.dtype)
    optimizer.step()


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((mine.double() - wanted.double()).abs().max().item() for mine, wanted in pairs)


@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("has_scaler", [False, True])
def test_a_fused_optimizer_steps_by_the_whole_batchs_gradient_in_the_parameters_dtype(name, dtype, has_scaler):
    model, batch = case(dtype)
    twin = copy.deepcopy(model)
    fused, by_hand = FUSED[name](model.parameters(), fused=True), FUSED[name](twin.parameters(), fused=True)
    handed: list[torch.dtype] = []
    fused.register_step_pre_hook(
        lambda optimizer, args, kwargs: handed.extend(p.grad.dtype for p in optimizer.param_groups[0]["params"])
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6) if has_scaler else None
    update = Update(model, fused, OBJECTIVE, micro_batch=3, clip_norm=1e3, scaler=scaler)
    for _ in range(3):
        before = copy.deepcopy(model)
        result = update(batch)
        assert (result.applied, result.units, result.micro_batches) == (True, 8, 4)
        step_by_hand(twin, by_hand, batch)
        moved = distance(model, before)
        assert distance(model, twin) < max(0.05 * moved, PRECISION[dtype] * 2), (distance(model, twin), moved)
        assert moved > 0
    assert handed == [dtype] * len(handed)
    assert len(handed) == 3 * 4


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_kernel_refuses_the_fp32_gradients_that_the_sum_is_made_in(name):
    model, batch = case(torch.bfloat16)
    Accumulator(model, OBJECTIVE, micro_batch=3, keep_fp32=True).backward(batch)
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    with pytest.raises(RuntimeError):
        FUSED[name](model.parameters(), fused=True).step()


def test_an_optimizer_that_takes_fp32_gradients_is_handed_them_as_they_were_summed():
    model, batch = case(torch.bfloat16)
    reference = whole_batch_gradient(model, classify, batch)
    Update(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), OBJECTIVE, micro_batch=3)(batch)
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    held = torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])
    assert float((held - reference).norm() / reference.norm()) < 2**-6
    assert not torch.equal(held, held.bfloat16().double()), "more digits than bf16 has"


def test_one_fused_group_among_others_makes_all_gradients_those_of_the_parameters():
    model, batch = case(torch.bfloat16)
    groups = [
        {"params": list(model[0].parameters()), "fused": False},
        {"params": list(model[2].parameters()), "fused": True, "foreach": False},
    ]
    before = copy.deepcopy(model)
    Update(model, torch.optim.SGD(groups, lr=0.1), OBJECTIVE, micro_batch=3)(batch)
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.bfloat16}
    pairs = zip(model.parameters(), before.parameters(), strict=True)
    assert all(not torch.equal(now, then) for now, then in pairs)
