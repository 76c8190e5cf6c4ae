"""What the optimizer really was handed, and which rows went into it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.table.case import Case, first_of, inputs_of, key_of, outputs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One step of the optimizer."""

    gradient: Tensor
    """All gradients in one vector, in float64."""
    weights: list[Tensor]
    """The parameters that the window saw."""
    rows: dict[int, float]
    """For each row that ran backward: the norm of the gradient that its output was given."""
    times: dict[int, int]
    """How often each of these rows ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All that one rank saw of one contender on one case."""

    updates: list[Recorded]
    lr: float
    """The learning rate at the end, as a share of the first."""
    scheduler_steps: int | None
    note: str = ""


@dataclass(slots=True)
class Witness:
    """Watches a model and its optimizer from below the frameworks: hooks on both, nothing in between.

    A row is told by what it holds, and counts when it runs backward. A window that was zeroed instead of stepped is seen by
    the empty gradients that the next backward finds, and its rows are forgotten.
    """

    case: Case
    model: nn.Module
    optimizer: torch.optim.Optimizer
    updates: list[Recorded] = field(default_factory=list)
    _numbers: dict[tuple[float, ...], int] = field(default_factory=dict)
    _rows: dict[int, float] = field(default_factory=dict)
    _times: dict[int, int] = field(default_factory=dict)
    _weights: list[Tensor] = field(default_factory=list)
    _is_new_pass: bool = False
    """A forward has run since the last backward."""

    def __post_init__(self) -> None:
        for number, row in enumerate(self.case.rows):
            self._numbers[key_of(first_of(row))] = number
        assert len(self._numbers) == len(self.case.rows), (
            "two rows are the same: neither could be told by what it holds"
        )
        self.model.register_forward_hook(self._after_forward, with_kwargs=True)
        self.optimizer.register_step_pre_hook(self._before_step)
        self.optimizer.register_step_post_hook(self._after_step)

    def _after_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        numbers = [self._numbers.get(key_of(row)) for row in inputs_of(args, kwargs)]
        rows = [(index, number) for index, number in enumerate(numbers) if number is not None]
        self._is_new_pass = True

        def before_backward(gradient: Tensor) -> None:
            if rows and self._is_new_pass and is_empty(model.parameters()):
                self._forget()
            self._is_new_pass = self._is_new_pass and not rows
            for index, number in rows:
                weight = float(gradient[index].double().norm()) if self.case.are_weights_seen else 0.0
                self._rows[number] = self._rows.get(number, 0.0) + weight
                self._times[number] = self._times.get(number, 0) + 1

        outputs_of(output).register_hook(before_backward)

    def _before_step(self, *_: Any) -> None:
        self._weights = [parameter.detach().clone() for parameter in self.model.parameters()]

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Only now: Lightning runs the last micro-batch, and clips, in a closure inside the step. SGD leaves them alone."""
        handed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in handed]
        gradient = torch.cat([grad.detach().double().flatten() for grad in grads])
        if not self._times and not gradient.any():
            return  # no row, no gradient, no update: with bf16, DeepSpeed sets up the optimizer's state by such a step
        self.updates.append(
            Recorded(
                gradient=gradient,
                weights=self._weights,
                rows=dict(self._rows),
                times=dict(self._times),
            )
        )
        self._forget()

    def _forget(self) -> None:
        self._rows.clear()
        self._times.clear()


def is_empty(parameters: Iterable[nn.Parameter]) -> bool:
    """No parameter has a gradient that is not 0."""
    return not any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in parameters)
