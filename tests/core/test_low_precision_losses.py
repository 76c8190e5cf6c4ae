"""Losses of low-precision models: contrastive ones in fp32 or better, shares and the batch's loss too."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Accumulator, Coupled, Objective, clip_loss, info_nce, stages
from tests.reference import relative_error, whole_batch_gradient

BF16, FP16 = torch.bfloat16, torch.float16
LOSSES = {
    "info_nce": lambda: info_nce(0.02),
    "symmetric": lambda: info_nce(0.02, symmetric=True, learned=True),
    "clip_loss": lambda: clip_loss(0.02),
}


def representations(dtype: torch.dtype, rows: int = 24) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    queries = torch.randn(rows, 32)
    keys = 0.2 * queries + torch.randn(rows, 32)
    first, second = (column.to(dtype).clone().requires_grad_() for column in (queries, keys))
    return first, second


def in_float64(name: str, pair: tuple[Tensor, Tensor]) -> tuple[float, list[Tensor]]:
    """Loss and gradients of the same numbers, every operation in float64, by the formula."""
    queries, keys = (column.detach().double().requires_grad_() for column in pair)
    scale = LOSSES[name]().log_scale.detach().double().exp()
    logits = F.normalize(queries, dim=-1) @ F.normalize(keys, dim=-1).T * scale
    own = torch.arange(len(queries))
    loss = F.cross_entropy(logits, own)
    if name != "info_nce":
        loss = (loss + F.cross_entropy(logits.T, own)) / 2
    loss.backward()
    return loss.item(), [queries.grad, keys.grad]


@pytest.mark.parametrize("autocast", [None, BF16, FP16])
@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
@pytest.mark.parametrize("name", LOSSES)
def test_contrastive_losses_are_computed_in_fp32_from_whatever_the_model_gives(name, dtype, autocast):
    pair = representations(dtype)
    wanted, grads = in_float64(name, pair)
    with torch.autocast("cpu", dtype=autocast or BF16, enabled=autocast is not None):
        loss = LOSSES[name]()(pair)
    loss.backward()
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx(wanted, rel=2e-5)
    for column, grad in zip(pair, grads, strict=True):
        rounding = 2e-5 if dtype is torch.float32 else 2**-8 if dtype is BF16 else 2**-9
        assert float((column.grad.double() - grad).norm() / grad.norm()) < rounding


@pytest.mark.parametrize("name", LOSSES)
def test_contrastive_losses_of_float64_stay_float64(name):
    pair = representations(torch.float64)
    loss = LOSSES[name]().double()(pair)
    assert loss.dtype is torch.float64
    scale = (LOSSES[name]().double().log_scale.exp() / LOSSES[name]().log_scale.double().exp()).item()
    assert scale == pytest.approx(1)
    assert loss.item() == pytest.approx(in_float64(name, pair)[0], rel=1e-12)


def test_the_same_formula_in_bf16_is_far_off():
    queries, keys = representations(BF16)
    wanted, _ = in_float64("info_nce", (queries, keys))
    logits = F.normalize(queries, dim=-1) @ F.normalize(keys, dim=-1).T / 0.02
    naive = F.cross_entropy(logits, torch.arange(len(queries)))
    assert abs(naive.item() / wanted - 1) > 20 * 2e-5


@pytest.mark.parametrize("is_autocast", [False, True])
def test_a_coupled_loss_over_a_low_precision_model_is_that_of_its_representations_in_float64(is_autocast):
    torch.manual_seed(0)
    model = nn.Linear(12, 32) if is_autocast else nn.Linear(12, 32).bfloat16()
    dtype = torch.float32 if is_autocast else BF16
    x = torch.randn(11, 12).to(dtype)
    seen: list[list[Tensor]] = []

    def encode(model: nn.Module, part: Tensor) -> tuple[Tensor, Tensor]:
        pair = model(part), model(0.1 * part + part.flip(1))
        seen.append([column.detach() for column in pair])
        return pair

    loss = clip_loss(0.02)
    accumulator = Accumulator(model, Coupled(encode, loss), micro_batch=4, autocast=BF16 if is_autocast else None)
    result = accumulator.backward(x)
    queries, keys = (torch.cat(column) for column in zip(*seen[:3], strict=True))
    assert queries.dtype is BF16
    wanted, _ = in_float64("clip_loss", (queries, keys))
    assert result.loss.dtype is torch.float32
    assert float(result.loss) == pytest.approx(wanted, rel=2e-5)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_coupled_loss_that_comes_in_low_precision_is_raised_to_fp32(dtype):
    torch.manual_seed(0)
    told: list[Tensor] = []
    accumulator = Accumulator(
        nn.Linear(3, 2).to(dtype),
        Coupled(lambda model, x: model(x), lambda outputs: outputs.square().mean()),
        micro_batch=2,
        observer=lambda event: told.append(event.loss) if isinstance(event, stages.Loss) else None,
    )
    result = accumulator.backward(torch.randn(5, 3).to(dtype))
    assert [loss.dtype for loss in (*told, result.loss)] == [torch.float32] * 2


def test_a_coupled_loss_runs_under_the_autocast_of_the_model():
    ran: list[bool] = []

    def loss(outputs: Tensor) -> Tensor:
        ran.append(torch.is_autocast_enabled("cpu"))
        return outputs.float().var()

    for autocast in (None, BF16):
        objective = Coupled(lambda model, x: model(x), loss)
        Accumulator(nn.Linear(3, 2), objective, micro_batch=2, autocast=autocast).backward(torch.randn(5, 3))
    assert ran == [False, True]


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_loss_of_the_batch_is_combined_in_fp32_from_losses_in_low_precision(dtype):
    torch.manual_seed(0)
    seen: list[Tensor] = []
    rows: list[int] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        rows.append(len(x))
        seen.append((model(x).square().mean() + 100 * x.abs().mean()).to(dtype))
        return seen[-1]

    result = Accumulator(nn.Linear(3, 1), Objective(loss), micro_batch=3).backward(torch.randn(7, 3))
    units = torch.tensor(rows, dtype=torch.float64)
    assert len(set(rows)) > 1
    losses = torch.stack([one.detach() for one in seen])
    wanted = float(losses.double() @ units / 7)
    assert result.loss.dtype is torch.float32
    assert float(result.loss) == pytest.approx(wanted, rel=1e-6)
    naive = (losses * (units / 7).to(dtype)).sum()
    assert abs(float(naive) / wanted - 1) > 1e-5


def test_shares_of_a_bf16_loss_are_rounded_once():
    """Three micro-batches of 1, 1 and 5 units: each gradient is its share, rounded to bf16, and no further off."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).mean().bfloat16()

    model = nn.Linear(3, 1, bias=False)
    objective = Objective(loss, units=lambda x: x[:, 0].sum())
    x = torch.eye(3) + torch.tensor([[0.0, 0, 0], [1, 0, 0], [5, 0, 0]])
    Accumulator(model, objective, micro_batch=1).backward(x)
    shares = torch.tensor([1 / 7, 1 / 7, 5 / 7])
    assert torch.equal(model.weight.grad[0, 1:], shares.bfloat16().float()[1:])
    assert relative_error(model, whole_batch_gradient(model, _by_hand, x)) < 2**-8
    mistake = nn.Linear(3, 1, bias=False)
    for part in x.split(1):
        (loss(mistake, part) / 3).backward()
    assert relative_error(mistake, whole_batch_gradient(mistake, _by_hand, x)) > 0.1


def _by_hand(model: nn.Module, x: Tensor) -> Tensor:
    units = x[:, 0]
    return (model(x)[:, 0] * units).sum() / units.sum()


def test_small_shares_of_an_fp16_loss_are_scaled_before_they_are_rounded():
    """A share of 1e-8 is 0 in fp16; scaled by 65,536 it is not."""

    def loss(model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
        return model(part[0]).mean().half()

    def units(part: tuple[Tensor, Tensor]) -> Any:
        return part[1].sum()

    model, x, weights = nn.Linear(2, 1, bias=False), torch.eye(2), torch.tensor([1.0, 1e8])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    Accumulator(model, Objective(loss, units=units), micro_batch=1).backward((x, weights), scaler=scaler)
    unscaled = model.weight.grad.double() / 2.0**15
    assert float(unscaled[0, 0]) == pytest.approx(1e-8, rel=2e-3)
    assert float(unscaled[0, 1]) == pytest.approx(1.0, rel=2e-3)
    assert float(torch.tensor(1e-8).half()) == 0.0
