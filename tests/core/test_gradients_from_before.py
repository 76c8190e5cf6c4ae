"""What `.grad` held before is added to, whatever its dtype, and an error leaves the very tensors that were there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Accumulator, MicroBatches, Objective, Window
from tests.reference import gradient, whole_batch_gradient

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DIGITS = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-23, FP64: 2.0**-52}
CASES = [
    # parameter, the dtype it asks of gradients (None: any), what is there before
    (BF16, BF16, BF16),
    (BF16, None, FP32),
    (BF16, FP32, FP32),
    (BF16, None, FP64),
    (FP16, FP16, FP16),
    (FP16, None, FP32),
    (FP32, None, BF16),
    (FP32, FP32, FP32),
    (FP32, None, FP64),
    (FP32, FP64, FP64),
    (FP64, None, FP32),
    (FP64, None, BF16),
]
ROWS = (4, 1, 3)
"""Ragged on purpose."""


def loss(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    return (output if output.dtype is FP64 else output.float()).square().mean()


def through_accumulator(model: nn.Module, x: Tensor, *, keep_fp32: bool) -> None:
    accumulator = Accumulator(model, Objective(loss), micro_batch=4, keep_fp32=keep_fp32)
    accumulator.backward(MicroBatches(x.split(ROWS)))


def through_window(model: nn.Module, x: Tensor, *, keep_fp32: bool) -> None:
    with Window(model.parameters(), keep_fp32=keep_fp32) as window:
        for part in x.split(ROWS):
            window.backward(loss(model, part), units=len(part))


WAYS: dict[str, Callable[..., None]] = {"Accumulator": through_accumulator, "Window": through_window}


def case(dtype: torch.dtype, asked: torch.dtype | None, before: torch.dtype | None) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).to(dtype), torch.randn(sum(ROWS), 3).to(dtype)
    for parameter in model.parameters():
        parameter.grad_dtype = asked
        if before is not None:
            parameter.grad = torch.randn(parameter.shape).to(before)
    return model, x


def error(model: nn.Module, wanted: Tensor) -> float:
    return float((gradient(model.parameters()) - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("keep_fp32", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dtype", "asked", "before"), CASES)
def test_the_whole_batchs_gradient_is_added_to_what_was_there(dtype, asked, before, way, keep_fp32):
    model, x = case(dtype, asked, before)
    held = gradient(model.parameters())
    whole = whole_batch_gradient(model, loss, x)
    WAYS[way](model, x, keep_fp32=keep_fp32)
    # backward computes in the parameter's dtype; the sum with what was there is no coarser than that, or than fp32
    stays_low = before in (BF16, FP16) and dtype is before and not keep_fp32
    coarsest = 8 * max(DIGITS[dtype] if dtype is FP64 else DIGITS[FP32], DIGITS[before] if stays_low else 0)
    own = DIGITS[dtype] * float(whole.abs().max() / (held + whole).abs().max())
    assert error(model, held + whole) < coarsest + 4 * own
    assert error(model, held) > 0.05, "forgetting the batch is another number"
    assert error(model, whole) > 0.05, "and so is forgetting what was there"
    dtypes = {parameter.grad.dtype for parameter in model.parameters()}
    if dtype in (BF16, FP16):
        assert dtypes == {FP32 if keep_fp32 else before}
    else:
        assert dtypes <= {dtype, before}
        assert DIGITS[dtypes.pop()] <= DIGITS[dtype]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("asked", [FP32, FP64])
def test_a_parameter_that_asks_for_finer_gradients_gets_them(asked, way):
    model, x = case(BF16, asked, None)
    WAYS[way](model, x, keep_fp32=False)
    assert {parameter.grad.dtype for parameter in model.parameters()} == {asked}
    assert {parameter.grad_dtype for parameter in model.parameters()} == {asked}
    held = gradient(model.parameters())
    assert not torch.equal(held, held.bfloat16().double()), "more digits than bf16 has"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dtype", "asked", "before"), CASES)
def test_an_error_leaves_the_very_tensors_and_what_is_asked_of_them(dtype, asked, before, way):
    model, x = case(dtype, asked, before)
    tensors = [parameter.grad for parameter in model.parameters()]
    copies = [grad.clone() for grad in tensors]
    calls: list[Any] = []

    def fail(module: nn.Module, args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise ValueError("a bad row")

    hook = model.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="a bad row"):
        WAYS[way](model, x, keep_fp32=False)
    hook.remove()
    assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), tensors, strict=True))
    assert all(map(torch.equal, tensors, copies))
    assert {parameter.grad_dtype for parameter in model.parameters()} == {asked}
    loss(model, x).backward()  # goes on as torch does


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_the_parameters_own_dtype_are_added_to_in_place(way):
    """As `backward()` does: who holds the tensor sees the sum."""
    for dtype in (BF16, FP32, FP64):
        model, x = case(dtype, dtype, dtype)
        held = model.weight.grad
        WAYS[way](model, x, keep_fp32=False)
        assert model.weight.grad is held


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_after_a_sum_that_stays_fp32_the_users_own_backward_makes_gradients_as_ever(dtype, way):
    model, x = case(dtype, dtype, None)
    WAYS[way](model, x, keep_fp32=True)
    assert model.weight.grad.dtype is FP32
    model.zero_grad()
    loss(model, x).backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {dtype}


def test_nine_sums_in_bf16_lose_what_one_rounding_keeps():
    """The mistake: each pass rounds into the bf16 gradient that was there before."""
    model, _ = case(BF16, BF16, BF16)
    model.weight.grad.fill_(64.0)
    tiny = 0.05  # of each pass: less than half of what bf16 can add to 64
    with Window([model.weight]) as window:
        for _ in range(9):
            window.backward(tiny * 9 * model.weight.float().sum(), units=1)
    assert float(model.weight.grad[0, 0]) == pytest.approx(64 + 9 * tiny, abs=0.25)
    naive = torch.full((2, 3), 64.0, dtype=BF16)
    for _ in range(9):
        naive += tiny
    assert float(naive[0, 0]) == 64.0
    assert float(model.weight.grad[0, 0]) > 64.0
