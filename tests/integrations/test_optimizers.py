"""Optimizers that people bring: cut batches move the weights as whole ones do, as far as the optimizer itself is precise."""

import bitsandbytes.optim
import pytest
import schedulefree
import torch
import torchao.optim
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from anybatch import Update, supervised


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96, bias=False), nn.Tanh(), nn.Linear(96, 64, bias=False))


OPTIMIZERS = {
    "SGD, fused": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True), 2e-6),
    "AdamW, foreach": (lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-6, foreach=True), 2e-6),
    "AdamW, fused": (lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-6, fused=True), 2e-6),
    "Adagrad, fused": (lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-6, fused=True), 1e-5),
    "AdamW, schedule-free": (lambda p: schedulefree.AdamWScheduleFree(p, lr=0.01, eps=1e-6), 2e-6),
    "SGD, schedule-free": (lambda p: schedulefree.SGDScheduleFree(p, lr=0.1), 2e-6),
    # Newton-Schulz in bf16: reversing the rows of one whole batch alone moves it by 5e-4
    "Muon": (lambda p: torch.optim.Muon(p, lr=0.02), 2e-3),
    # states of 8 bits: a last digit may turn a code, whose step is a hundredth of the largest number beside it
    "bitsandbytes AdamW8bit": (lambda p: bitsandbytes.optim.AdamW8bit(p, lr=0.01, eps=1e-6), 5e-4),
    "bitsandbytes Lion8bit": (lambda p: bitsandbytes.optim.Lion8bit(p, lr=0.001), 2e-6),
    "torchao AdamW8bit": (lambda p: torchao.optim.AdamW8bit(p, lr=0.01, eps=1e-6), 5e-4),
    "torchao AdamWFp8": (lambda p: torchao.optim.AdamWFp8(p, lr=0.01, eps=1e-6), 1e-3),
}


def weights_after(make, micro_batch, batches):
    model = net()
    optimizer = make(model.parameters())
    if hasattr(optimizer, "train"):
        optimizer.train()
    update = Update(
        model, optimizer, supervised(nn.CrossEntropyLoss(torch.linspace(0.2, 5.0, 64))), micro_batch=micro_batch
    )
    for batch in batches:
        update(batch)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.fixture
def _eagerly():
    """torchao's steps as they are, without the half minute in which they are compiled."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.usefixtures("_eagerly")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_five_updates_of_a_cut_batch_are_those_of_the_whole(name):
    make, limit = OPTIMIZERS[name]
    torch.manual_seed(1)
    batches = [(torch.randn(22, 64), torch.randint(0, 64, (22,))) for _ in range(5)]
    whole, cut = (weights_after(make, size, batches) for size in (22, 4))
    assert float((cut - whole).norm() / whole.norm()) <= limit
    shorter = weights_after(make, 4, [(x[:21], y[:21]) for x, y in batches])
    assert float((shorter - whole).norm() / whole.norm()) > 10 * limit, "one row less is seen"


class Compiled(torch.optim.SGD):
    """As torchao's: its step is one graph, and torch compiles none while a mode watches."""

    __module__ = "torchao.optim.adam"

    def step(self, closure=None):
        assert _get_current_dispatch_mode() is None
        return super().step(closure)


def test_a_step_that_torch_compiles_is_not_watched():
    torch.manual_seed(1)
    batches = [(torch.randn(22, 64), torch.randint(0, 64, (22,))) for _ in range(4)]
    whole, cut = (weights_after(lambda p: Compiled(p, lr=0.1), size, batches) for size in (22, 4))
    assert float((cut - whole).norm() / whole.norm()) <= 2e-6
