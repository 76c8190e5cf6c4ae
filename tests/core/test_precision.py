"""Low precision: gradients summed in fp32, handed over in a dtype that the optimizer takes; losses in fp32."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Accumulator, Coupled, Objective, Update, clip_loss, info_nce, stages, supervised
from tests.reference import gradient, relative_error, whole_batch_gradient

BF16_BOUND = 2.5e-3


def linear_case() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return nn.Linear(64, 10).bfloat16(), (torch.randn(1024, 64).bfloat16(), torch.randint(0, 10, (1024,)))


def half_case(dtype: torch.dtype, micro_batches: int = 256) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(dtype)
    x = torch.randn(micro_batches * 2, 16).to(dtype)
    return model, (x, torch.randint(0, 4, (micro_batches * 2,)))


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss in fp32, as careful people compute it."""
    logits = model(batch[0])
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), batch[1])


@pytest.mark.parametrize("objective", [Objective(cross_entropy), supervised(nn.CrossEntropyLoss())])
def test_bf16_parameters_over_256_micro_batches_stay_within_the_bound(objective):
    model, batch = linear_case()
    reference = whole_batch_gradient(model, cross_entropy, batch)
    assert Accumulator(model, objective, micro_batch=4).backward(batch).micro_batches == 256
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert relative_error(model, reference) < BF16_BOUND


def test_a_deeper_model_is_no_further_off_than_its_own_whole_batch_in_bf16():
    model, batch = half_case(torch.bfloat16)
    reference = whole_batch_gradient(model, cross_entropy, batch)
    at_once = copy.deepcopy(model)
    cross_entropy(at_once, batch).backward()
    Accumulator(model, Objective(cross_entropy), micro_batch=2).backward(batch)
    assert relative_error(model, reference) < 1.2 * relative_error(at_once, reference)


def test_the_plain_bf16_sum_does_not():
    model, batch = linear_case()
    reference = whole_batch_gradient(model, cross_entropy, batch)
    for x, y in zip(batch[0].split(4), batch[1].split(4), strict=True):
        (cross_entropy(model, (x, y)) / 256).backward()
    assert relative_error(model, reference) > 4 * BF16_BOUND


def test_gradients_that_stay_fp32_are_closer_still():
    model, batch = half_case(torch.bfloat16)
    reference = whole_batch_gradient(model, cross_entropy, batch)
    rounded, kept = model, copy.deepcopy(model)
    Accumulator(rounded, Objective(cross_entropy), micro_batch=2).backward(batch)
    Accumulator(kept, Objective(cross_entropy), micro_batch=2, keep_fp32=True).backward(batch)
    assert {parameter.grad.dtype for parameter in kept.parameters()} == {torch.float32}
    assert relative_error(kept, reference) < relative_error(rounded, reference)


OPTIMIZERS = {
    "SGD": torch.optim.SGD,
    "SGD with momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
    "Adafactor": torch.optim.Adafactor,
    "Adadelta": torch.optim.Adadelta,
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "fused AdamW": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, fused=True),
    "foreach AdamW": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, foreach=True),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_optimizer_of_torch_gets_gradients_that_it_takes(name, dtype):
    model, batch = half_case(dtype, micro_batches=8)
    optimizer = OPTIMIZERS[name](model.parameters(), lr=0.01)
    for group in optimizer.param_groups:
        if isinstance(group.get("eps"), float):
            group["eps"] = 1e-3  # the default of 1e-8 is 0 in fp16
    before = model[0].weight.detach().clone()
    update = Update(model, optimizer, Objective(cross_entropy), micro_batch=2)
    for _ in range(3):
        reference = whole_batch_gradient(model, cross_entropy, batch)
        assert update(batch).applied
        assert relative_error(model, reference) < 5e-3
    assert not torch.equal(model[0].weight, before)
    assert model[0].weight.dtype == dtype


def test_adamw_would_refuse_fp32_gradients():
    model, batch = half_case(torch.bfloat16, micro_batches=4)
    Accumulator(model, Objective(cross_entropy), micro_batch=2, keep_fp32=True).backward(batch)
    with pytest.raises(RuntimeError, match="dtype"):
        torch.optim.AdamW(model.parameters()).step()


@pytest.mark.parametrize("options", [{}, {"centered": True}])
def test_rmsprop_steps_bf16_parameters_centred_or_not(options):
    model = nn.Linear(4, 3).to(torch.bfloat16)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, **options)
    update = Update(model, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=4)
    assert update((torch.randn(8, 4).bfloat16(), torch.randint(0, 3, (8,)))).applied


def test_muon_takes_fp32_gradients_of_bf16_matrices():
    torch.manual_seed(0)
    model = nn.Linear(16, 4, bias=False).bfloat16()
    batch = (torch.randn(8, 16).bfloat16(), torch.randint(0, 4, (8,)))
    before = model.weight.detach().clone()
    Update(model, torch.optim.Muon(model.parameters()), Objective(cross_entropy), micro_batch=2)(batch)
    assert not torch.equal(model.weight, before)


def test_the_grad_dtype_of_the_users_parameters_is_given_back():
    model, batch = half_case(torch.bfloat16, micro_batches=4)
    Accumulator(model, Objective(cross_entropy), micro_batch=2).backward(batch)
    assert {parameter.grad_dtype for parameter in model.parameters()} == {torch.bfloat16}
    cross_entropy(model, batch).backward()
    with pytest.raises(ZeroDivisionError):
        Accumulator(model, Objective(lambda model, part: 1 / 0), micro_batch=2).backward(batch)
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_bf16_gradients_that_were_there_before_are_added_to():
    model, batch = half_case(torch.bfloat16, micro_batches=4)
    accumulator = Accumulator(model, Objective(cross_entropy), micro_batch=2)
    accumulator.backward(batch)
    once = gradient(model.parameters())
    accumulator.backward(batch)
    assert torch.allclose(gradient(model.parameters()), 2 * once, rtol=2**-6, atol=1e-4)


def test_bf16_gradients_that_were_there_before_join_a_sum_that_stays_fp32():
    model, batch = half_case(torch.bfloat16, micro_batches=4)
    Accumulator(model, Objective(cross_entropy), micro_batch=2).backward(batch)
    once = gradient(model.parameters())
    Accumulator(model, Objective(cross_entropy), micro_batch=2, keep_fp32=True).backward(batch)
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.allclose(gradient(model.parameters()), 2 * once, rtol=2**-6, atol=1e-4)


def test_fp16_without_a_scaler_does_not_underflow_in_the_shares():
    torch.manual_seed(0)
    model = nn.Linear(16, 4, bias=False).half()
    batch = ((torch.randn(1024, 16) * 1e-3).half(), torch.randint(0, 4, (1024,)))
    reference = whole_batch_gradient(model, cross_entropy, batch)
    Accumulator(model, Objective(cross_entropy), micro_batch=2).backward(batch)
    exact = relative_error(model, reference)
    model.zero_grad()
    for x, y in zip(batch[0].split(2), batch[1].split(2), strict=True):
        (cross_entropy(model, (x, y)) / 512).backward()
    assert exact < 2e-3
    assert relative_error(model, reference) > 10 * exact


def test_fp16_parameters_with_a_scaler_and_adamw():
    model, batch = half_case(torch.float16, micro_batches=16)
    reference = whole_batch_gradient(model, cross_entropy, batch)
    update = Update(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        Objective(cross_entropy),
        micro_batch=2,
        clip_norm=1e3,
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10),
    )
    result = update(batch)
    assert result.applied
    assert relative_error(model, reference) < 5e-3
    assert float(result.grad_norm) == pytest.approx(float(reference.norm()), rel=5e-3)


def test_fp16_autocast_keeps_the_shares_from_underflowing_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    batch = (torch.randn(512, 16) * 1e-2, torch.randint(0, 4, (512,)))
    reference = whole_batch_gradient(model, lambda twin, whole: F.cross_entropy(twin(whole[0]), whole[1]), batch)
    Accumulator(model, supervised(nn.CrossEntropyLoss()), micro_batch=2, autocast=torch.float16).backward(batch)
    assert relative_error(model, reference) < 5e-3


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
