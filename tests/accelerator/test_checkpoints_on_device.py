"""Checkpoints saved on the device go on, on the device or on the host, as if nothing had been between; and back."""

import pytest
import torch
from torch import nn

from anybatch import Update, resume, save
from tests.accelerator.on_device import on_device
from tests.accelerator.plugged import plug
from tests.accelerator.setups import HOST, adamw, batch, cross_entropy, mlp, off, with_row_dropout


def begun(device: torch.device, make: object) -> Update:
    model = make().to(device)
    return Update(model, adamw(model.parameters()), cross_entropy(), micro_batch=8, check="off")


@pytest.mark.parametrize(("saved_on", "resumed_on"), [("device", "host"), ("host", "device"), ("device", "device")])
@on_device
def test_a_run_goes_on_elsewhere(saved_on, resumed_on):
    import tempfile

    places = {"device": plug(), "host": HOST}
    one = begun(places[saved_on], with_row_dropout)
    for _ in range(2):
        one(batch())
    with tempfile.TemporaryDirectory() as folder:
        save(folder, one, number=2)
        other = begun(places[resumed_on], with_row_dropout)
        assert resume(folder, other).number == 2
    state = next(iter(other.optimizer.state.values()))
    assert state["exp_avg"].device.type == places[resumed_on].type
    for _ in range(2):
        one(batch())
        other(batch())
    assert off(one.model, other.model) <= 5e-7


@on_device
def test_the_devices_own_random_state_is_put_back():
    import tempfile

    def make() -> nn.Module:
        return mlp(nn.Dropout(0.5))

    one = begun(plug(), make)
    one(batch())
    with tempfile.TemporaryDirectory() as folder:
        save(folder, one, number=1)
        one(batch())
        torch.rand(5, device=plug())
        other = begun(plug(), make)
        resume(folder, other)
        other(batch())
    assert off(one.model, other.model) == 0.0
