"""Models, batches and runs that the tests on the device share: the same on the host is what they are compared with."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from anybatch import Coupled, Objective, Update, UpdateResult, info_nce, row_dropout, supervised

ROWS, FEATURES, CLASSES = 30, 6, 3
HOST = torch.device("cpu")


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Rows whose targets are ignored now and then, so that micro-batches have different units."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(rows, FEATURES, generator=generator)
    targets = torch.randint(0, CLASSES, (rows,), generator=generator)
    targets[1:9:2] = -100
    return inputs, targets


def mlp(*inside: nn.Module, width: int = 16) -> nn.Sequential:
    """The same weights whenever it is asked for; copies of `inside` come after the first layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(FEATURES, width), *copy.deepcopy(inside), nn.Tanh(), nn.Linear(width, CLASSES))


def cross_entropy() -> Objective:
    """Rows with their targets."""
    return supervised(nn.CrossEntropyLoss())


def contrastive() -> Coupled:
    """Rows against the same rows, reversed in their features."""
    return Coupled(lambda model, rows: (model(rows[0]), model(rows[0].flip(1))), info_nce(temperature=0.5))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """With an eps that does not divide noise by noise."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-5)


def trained(
    device: torch.device,
    *,
    updates: int = 3,
    rows: int = ROWS,
    model: Callable[[], nn.Module] = mlp,
    objective: Callable[[], Objective | Coupled] = cross_entropy,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    scaler: bool = False,
    check: Any = "off",
    **options: Any,
) -> tuple[nn.Module, UpdateResult, Update]:
    """A model after so many updates there; the batch comes from the host."""
    torch.manual_seed(3)
    there = model().to(device)
    if scaler:
        options["scaler"] = torch.amp.GradScaler(device.type, init_scale=2.0**12)
    update = Update(there, optimizer(there.parameters()), objective(), check=check, **{"micro_batch": 8, **options})
    for _ in range(updates):
        result = update(batch(rows))
    return there, result, update


def off(model: nn.Module, other: nn.Module) -> float:
    """The largest difference of a parameter or buffer, wherever they are."""
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((one.cpu().double() - two.cpu().double()).abs().max()) for one, two in pairs)


def with_row_dropout() -> nn.Module:
    """Masks that depend on the row alone."""
    return row_dropout(mlp(nn.Dropout(0.3)), seed=5)
