"""Gradients of micro-batches on the device, beside one backward pass over the whole batch in float64 on the CPU."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from anybatch.objectives import Coupled, Objective, info_nce, supervised
from anybatch.passes import Accumulator
from anybatch.selftest.checked import Checked

ROWS, FEATURES, CLASSES, MICRO_BATCH = 60, 16, 5, 8
WEIGHTS = (0.2, 1.0, 20.0, 1.0, 3.0)
FP32, BF16 = 2e-6, 2e-2
"""What gradients may be off by where forwards run in this precision."""

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model, the loss of all rows by plain torch, the same as an objective, and how it is accumulated."""

    model: Callable[[], nn.Module]
    whole: Loss
    objective: Callable[[torch.device], Objective | Coupled]
    options: dict[str, Any] = field(default_factory=dict)
    at_most: float = FP32


def exactness_checks(device: torch.device) -> Iterator[Checked]:
    """One check for each setup, and the common mistake, which has to be seen."""
    for name, setup in SETUPS.items():
        error = _error(setup, device)
        wanted = f"at most {setup.at_most:.0e}"
        yield Checked(
            group="exactness", name=name, found=f"{error:.1e}", wanted=wanted, has_passed=error <= setup.at_most
        )
    wrong = _mean_of_means(device)
    name = "the mean of means, to see it fail"
    yield Checked(group="exactness", name=name, found=f"{wrong:.1e}", wanted="more than 1e-02", has_passed=wrong > 1e-2)


def mlp(*inside: Callable[[], nn.Module], width: int = 64) -> nn.Module:
    """Two layers, the same whenever they are made; `inside` comes between."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        between = [make() for make in inside]
        return nn.Sequential(nn.Linear(FEATURES, width), *between, nn.Tanh(), nn.Linear(width, CLASSES))


def some_rows(count: int = ROWS) -> tuple[Tensor, Tensor]:
    """Inputs, and targets of which some are ignored."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, FEATURES, generator=generator)
    targets = torch.randint(0, CLASSES, (count,), generator=generator)
    targets[: count // 4 : 2] = -100
    return inputs, targets


def counted_targets(device: torch.device, weights: tuple[float, ...] | None = None) -> Objective:
    """Cross entropy, with class weights where they are given."""
    return supervised(nn.CrossEntropyLoss(None if weights is None else torch.tensor(weights).to(device)))


def _cross_entropy(
    model: nn.Module, inputs: Tensor, targets: Tensor, weights: tuple[float, ...] | None = None
) -> Tensor:
    outputs = model(inputs)
    weight = None if weights is None else torch.tensor(weights, dtype=outputs.dtype)
    return functional.cross_entropy(outputs, targets, weight=weight)


def _pairs(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    return model(inputs), model(inputs.flip(1))


def _contrast(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    one, other = (functional.normalize(side) for side in _pairs(model, inputs))
    return functional.cross_entropy(one @ other.T / 0.5, torch.arange(len(inputs)))


def _contrastive(device: torch.device) -> Coupled:
    return Coupled(lambda model, batch: _pairs(model, batch[0]), info_nce(temperature=0.5, symmetric=False))


def _normed(width: int) -> Callable[[], nn.Module]:
    return partial(mlp, partial(nn.BatchNorm1d, width), width=width)


_plain = partial(Setup, whole=_cross_entropy, objective=counted_targets)
SETUPS = {
    "targets that are ignored": _plain(model=mlp),
    "class weights": Setup(
        model=mlp,
        whole=partial(_cross_entropy, weights=WEIGHTS),
        objective=partial(counted_targets, weights=WEIGHTS),
    ),
    "a contrastive loss over all rows": Setup(model=mlp, whole=_contrast, objective=_contrastive),
    "BatchNorm over the whole batch": _plain(model=_normed(64), options={"batch_norm": "exact"}),
    "the same, saved tensors put away": _plain(model=_normed(1024), options={"batch_norm": "exact", "offload": "away"}),
    "micro-batches sent ahead": _plain(model=mlp, options={"prefetch": True}),
    "bf16 parameters": _plain(model=lambda: mlp().bfloat16(), at_most=BF16),
    "autocast in bf16": _plain(model=mlp, options={"autocast": torch.bfloat16}, at_most=BF16),
}


def _error(setup: Setup, device: torch.device) -> float:
    """How far the accumulated gradient is from the whole batch's, of its norm."""
    is_host = device.type == "cpu"
    options = dict(setup.options)
    if options.get("offload") == "away":
        options["offload"] = "disk" if is_host else "host"
    model = setup.model().to(device)
    inputs, targets = some_rows()
    batch = inputs.to(next(model.parameters()).dtype), targets
    if not is_host and options.get("prefetch"):
        batch = batch[0].pin_memory(), batch[1].pin_memory()
    Accumulator(model, setup.objective(device), micro_batch=MICRO_BATCH, **options).backward(batch)
    return _off(model, setup)


def _mean_of_means(device: torch.device) -> float:
    setup = SETUPS["targets that are ignored"]
    model = setup.model().to(device)
    pieces = list(zip(*(column.to(device).split(MICRO_BATCH) for column in some_rows()), strict=True))
    for inputs, targets in pieces:
        (setup.whole(model, inputs, targets) / len(pieces)).backward()
    return _off(model, setup)


def _off(model: nn.Module, setup: Setup) -> float:
    twin = setup.model().double()
    inputs, targets = some_rows()
    setup.whole(twin, inputs.double(), targets).backward()
    ours, theirs = (
        torch.cat(
            [parameter.grad.cpu().double().flatten() for parameter in one.parameters() if parameter.grad is not None]
        )
        for one in (model, twin)
    )
    return float((ours - theirs).norm() / theirs.norm())
