"""What every update should have been handed: the whole batch at once, in float64, at the weights of that update."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.table.case import Case, first_of, inputs_of, key_of, outputs_of
from benchmarks.table.witness import Recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The gradient of one whole batch."""

    gradient: Tensor
    rows: dict[int, float]
    """For each row the norm of the gradient that its output is given."""


def whole_batch(case: Case, recorded: Recorded, rows: range) -> Wanted:
    """One backward pass over these rows, clipped where the case clips."""
    twin = precise_twin(case.model())
    with torch.no_grad():
        for parameter, weight in zip(twin.parameters(), recorded.weights, strict=True):
            parameter.copy_(weight)
    numbers, outputs = {}, []
    for number in rows:
        numbers[key_of(first_of(case.rows[number]))] = number

    def after_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        logits = outputs_of(output)
        logits.retain_grad()
        outputs.append((inputs_of(args, kwargs), logits))

    twin.register_forward_hook(after_forward, with_kwargs=True)
    batch = case.collate([doubled(case.rows[number]) for number in rows])
    (case.precise_loss or case.loss)(twin, batch).backward()
    gradient = torch.cat(
        [
            torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
            for p in twin.parameters()
            if p.requires_grad
        ]
    )
    if case.clip_norm is not None:
        gradient = gradient * min(1.0, case.clip_norm / (float(gradient.norm()) + 1e-6))
    norms = {}
    for inputs, logits in outputs:
        low = inputs.to(first_of(case.rows[0]).dtype)
        for row, grad in zip(low, logits.grad, strict=True):
            if key_of(row) in numbers:
                norms[numbers[key_of(row)]] = float(grad.norm())
    return Wanted(gradient=gradient, rows=norms)


def precise_twin(model: nn.Module) -> nn.Module:
    """A copy in float64; layers that would compute in fp32 whatever their weights give way to ones that do not."""
    twin = copy.deepcopy(model).double()
    twin.train()
    for parent in list(twin.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm") and not isinstance(child, nn.RMSNorm):
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon, dtype=torch.float64)
                norm.weight = child.weight
                setattr(parent, name, norm)
    return twin


def doubled(row: Any) -> Any:
    """The row with its floating-point tensors in float64."""
    if isinstance(row, dict):
        return dict(zip(row, doubled(tuple(row.values())), strict=True))
    return tuple(part.double() if isinstance(part, Tensor) and part.is_floating_point() else part for part in row)
