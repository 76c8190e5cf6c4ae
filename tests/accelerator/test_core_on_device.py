"""The core of the suite, run on the device: what was exact on the host is exact there, and the same."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from anybatch import Accumulator, NonFiniteError, Objective, Update, supervised, verify
from tests.accelerator.on_device import on_device, on_each_device
from tests.accelerator.plugged import plug
from tests.accelerator.setups import (
    HOST,
    batch,
    contrastive,
    cross_entropy,
    mlp,
    off,
    trained,
    with_row_dropout,
)
from tests.reference import doubled, mean_of_means, relative_error, whole_batch_gradient

FLOOR = 5e-7


def loss_of(model: nn.Module, rows: object) -> torch.Tensor:
    return nn.functional.cross_entropy(model(rows[0]), rows[1])


@on_each_device
def test_the_gradient_is_the_whole_batchs(device):
    model = mlp()
    reference = whole_batch_gradient(model, loss_of, batch())
    model.to(device)
    Accumulator(model, cross_entropy(), micro_batch=8).backward(batch())
    assert relative_error(model.cpu(), reference) <= FLOOR


@on_each_device
def test_the_mean_of_means_is_not(device):
    model = mlp()
    reference = whole_batch_gradient(model, loss_of, batch())
    parts = zip(*(column.to(device).split(8) for column in batch()), strict=True)
    mean_of_means(model.to(device), loss_of, parts)
    assert relative_error(model.cpu(), reference) > 0.01


@on_each_device
def test_a_coupled_loss_and_exact_batch_norm_are_the_whole_batchs(device):
    model, objective = mlp(), contrastive()
    reference = whole_batch_gradient(model, lambda twin, rows: objective.loss(objective.encode(twin, rows)), batch())
    Accumulator(model.to(device), objective, micro_batch=8).backward(batch())
    assert relative_error(model.cpu(), reference) <= FLOOR

    normed = mlp(nn.BatchNorm1d(16))
    reference = whole_batch_gradient(normed, loss_of, batch())
    twin = copy.deepcopy(normed).double()
    loss_of(twin, doubled(batch()))
    Accumulator(normed.to(device), cross_entropy(), micro_batch=8, batch_norm="exact").backward(batch())
    assert relative_error(normed.cpu(), reference) <= 4 * FLOOR
    assert torch.allclose(normed[1].running_var.double(), twin[1].running_var, rtol=1e-5)


CASES = {
    "plain": {},
    "clipped": {"clip_norm": 0.1},
    "clipped by value": {"clip_value": 0.01},
    "raise": {"on_nonfinite": "raise"},
    "skip": {"on_nonfinite": "skip"},
    "drop": {"on_nonfinite": "drop"},
    "ignore": {"on_nonfinite": "ignore"},
    "first look": {"check": "first"},
    "coupled": {"objective": contrastive},
    "batch norm micro": {"model": partial(mlp, nn.BatchNorm1d(16)), "batch_norm": "micro"},
    "batch norm exact": {"model": partial(mlp, nn.BatchNorm1d(16)), "batch_norm": "exact", "offload": None},
    "batch norm frozen": {"model": partial(mlp, nn.BatchNorm1d(16)), "batch_norm": "frozen"},
    "dropout by row": {"model": with_row_dropout},
    "scaler": {"scaler": True},
    "bf16 parameters": {"model": lambda: mlp().bfloat16(), "objective": lambda: bf16_rows()},
    "fused": {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-5, fused=True)},
    "auto": {"micro_batch": "auto"},
}


def bf16_rows() -> Objective:
    return Objective(
        lambda model, rows: nn.functional.cross_entropy(model(rows[0].bfloat16()).float(), rows[1]),
        lambda rows: (rows[1] != -100).sum(),
    )


@pytest.mark.parametrize("name", CASES)
@on_device
def test_updates_there_are_those_of_the_host(name):
    ours, result, _ = trained(plug(), **copy.deepcopy(CASES[name]))
    theirs, expected, _ = trained(HOST, **copy.deepcopy(CASES[name]))
    assert result.applied
    assert result.loss.device.type == result.grad_norm.device.type == "pretend"
    assert float(result.loss) == pytest.approx(float(expected.loss), rel=1e-5)
    assert off(ours, theirs) <= FLOOR


@on_device
def test_class_weights_lie_where_the_model_is():
    def run(device: torch.device) -> nn.Module:
        weights = torch.tensor([0.2, 1.0, 20.0]).to(device)
        return trained(device, objective=lambda: supervised(nn.CrossEntropyLoss(weights)))[0]

    assert off(run(plug()), run(HOST)) <= FLOOR


@on_device
def test_what_exact_batch_norm_puts_away_on_the_host_or_on_disk_comes_back():
    options = {"model": partial(mlp, nn.BatchNorm1d(512), width=512), "batch_norm": "exact"}
    theirs, _, _ = trained(HOST, **copy.deepcopy(options))
    for offload in ("host", "disk"):
        ours, _, _ = trained(plug(), offload=offload, **copy.deepcopy(options))
        assert off(ours, theirs) <= FLOOR


@on_each_device
def test_autocast_runs_in_bf16_there_and_sums_in_fp32(device):
    seen = []
    model = mlp()
    model[-1].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    model.to(device)
    Accumulator(model, cross_entropy(), micro_batch=8, autocast=torch.bfloat16).backward(batch())
    assert set(seen) == {torch.bfloat16}
    assert relative_error(model.cpu(), whole_batch_gradient(mlp(), loss_of, batch())) < 0.02


@on_each_device
def test_verify_and_a_batch_that_lies_there(device):
    rows = tuple(column.to(device) for column in batch())
    verdict = verify(mlp().to(device), cross_entropy(), rows, micro_batch=8)
    assert verdict.is_exact, verdict.describe()
    model = mlp()
    reference = whole_batch_gradient(model, loss_of, batch())
    Accumulator(model.to(device), cross_entropy(), micro_batch=8).backward(rows)
    assert relative_error(model.cpu(), reference) <= FLOOR


@on_each_device
def test_one_bad_row_is_named_or_dropped(device):
    inputs, targets = batch()
    inputs[17] = torch.inf
    model = mlp().to(device)
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), cross_entropy(), micro_batch=8, check="off")
    with pytest.raises(NonFiniteError, match="micro-batch 2 of 4"):
        update((inputs, targets))
    assert off(model, mlp()) == 0.0
    update.on_nonfinite = "drop"
    assert list(update((inputs, targets)).dropped) == [2]
    assert off(model, mlp()) > 0
