"""Low precision: gradients summed in fp32, handed over in a dtype that the optimizer takes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Accumulator, Objective, Update, supervised
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
