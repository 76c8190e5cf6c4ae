"""Copies to experiment on, and the state of what cannot be copied: saved, and restored."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core import Batch, Coupled, Objective, buffers_of, map_tensors, outer_random, random_state
from anybatch.errors import VerifyError
from anybatch.verification.compared_precision import LOWER, raised
from anybatch.verification.python_state import PythonState

Copy = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True, slots=True)
class ObjectiveState:
    """State that the functions of an objective reach, as it was when this was made."""

    python: PythonState
    parameters: dict[str, nn.Parameter]
    """Parameters of modules that they hold, and free ones; none of them the model's."""
    tensors: tuple[Tensor, ...]
    """These, and the buffers of the modules."""

    @contextmanager
    def fresh(self, *, is_raised: bool) -> Iterator[None]:
        """The block in which everything is as it was at first, without gradients; in float64 if `is_raised`."""
        self.python.put_back()
        before = [(tensor, tensor.data) for tensor in self.tensors]
        grads = [(parameter, parameter.grad) for parameter in self.parameters.values()]
        try:
            for parameter, _ in grads:
                parameter.grad = None
            for tensor, data in before:
                if is_raised and data.dtype in LOWER:
                    tensor.data = raised(data)
            yield
        finally:
            for parameter, _ in grads:
                parameter.grad = None  # of the other dtype
            for tensor, data in before:
                tensor.data = data
            for parameter, grad in grads:
                parameter.grad = grad
            self.python.put_back()


def functions_of(objective: Objective | Coupled) -> list[Any]:
    """All that an objective calls."""
    if isinstance(objective, Coupled):
        return [objective.encode, objective.loss, objective.units]
    return [objective.loss, objective.units, *(units for units in objective.terms.values() if units is not None)]


def objective_state(objective: Objective | Coupled, model: nn.Module) -> ObjectiveState:
    """Collect what this objective holds beside the model."""
    python = PythonState(*functions_of(objective), owned=[*model.modules()])
    own = set(map(id, model.parameters()))
    held = {
        f"{name}.{path}": parameter
        for name, module in python.modules.items()
        for path, parameter in module.named_parameters()
    }
    named = {name: parameter for name, parameter in (held | python.free_parameters).items() if id(parameter) not in own}
    parameters = {id(parameter): (name, parameter) for name, parameter in reversed(named.items())}  # each once
    buffers = [buffer for module in python.modules.values() for buffer in module.buffers()]
    known = {id(tensor): tensor for tensor in (*named.values(), *buffers)}
    return ObjectiveState(python, dict(reversed(parameters.values())), tuple(known.values()))


def copy_model(model: nn.Module, make: Copy | None = None) -> nn.Module:
    """Return another model with the same weights, state and modes, and no gradients.

    `make` copies models that `copy.deepcopy` refuses.
    """
    try:
        twin = copy.deepcopy(model) if make is None else make(model)
    except Exception as error:
        raise VerifyError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {str(error)[:200]}), and its gradients are "
            "compared on a copy. Call verify(model, objective, batch, copy=...) with a function of the model that returns "
            "another one with the same weights, for example copy=lambda model: load(build(), model.state_dict())."
        ) from error
    if not isinstance(twin, nn.Module) or twin is model:
        raise VerifyError(
            f"copy(model) returned {'the model itself' if twin is model else type(twin).__name__}; expected another "
            "torch.nn.Module with the same weights."
        )
    if not {id(parameter) for parameter in twin.parameters()}.isdisjoint(map(id, model.parameters())):
        raise VerifyError("copy(model) shares parameters with the model; expected one with parameters of its own.")
    if make is not None:
        modes = {name: module.training for name, module in model.named_modules()}
        for name, module in twin.named_modules():
            module.training = modes.get(name, module.training)
    twin.zero_grad(set_to_none=True)
    return twin


def free_parameters(twin: nn.Module) -> None:
    """Give back the memory of a copy's parameters and gradients at once; buffers may be the user's own."""
    for parameter in twin.parameters():
        parameter.grad = None
        parameter.data = parameter.data.new_empty(0)


def rounded_otherwise(model: nn.Module, make: Copy | None, unit: float) -> nn.Module:
    """A copy whose parameters are each off by a few units of roundoff."""
    twin = copy_model(model, make)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.is_floating_point():
                noise = 4 * unit * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                moved = parameter.double() * (1 + noise.to(parameter.device))
                parameter.data = moved if unit < 1e-12 else moved.to(parameter.dtype)
    return twin


def copy_batch(batch: Batch) -> Batch:
    """The batch with tensors of its own."""
    return map_tensors(batch, lambda tensor: tensor.detach().clone())


@contextmanager
def leaving_untouched(model: nn.Module, objective: Objective | Coupled) -> Iterator[ObjectiveState]:
    """Restore gradients, buffers, all random states and what the objective holds when the block ends.

    Raises:
        VerifyError: If the objective used the model that it was made with, not the copy that it was given.
    """
    held = objective_state(objective, model)
    parameters = [*model.parameters()]
    grads = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None  # so that copies have none, and what is there later was put there
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {tensor.device for tensor in (*parameters, *model.buffers())}
    states = random_state(devices), outer_random()
    try:
        yield held
    finally:
        is_touched = any(parameter.grad is not None for parameter in parameters)
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        held.python.put_back()
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
        for state in states:
            state.restore()
    if is_touched:
        raise VerifyError(
            f"the objective left gradients in the {type(model).__name__} that it was made with, not in the copy that it "
            "was given: it uses a model from outside. Write it as a function of its arguments: loss(model, batch)."
        )


@dataclass(frozen=True, slots=True)
class ModelState:
    """All state of a model and of the functions that call it, at one moment."""

    tensors: dict[str, tuple[dict[str, Tensor | None] | None, Tensor, Tensor]]
    """By name: the table that a buffer is held in, the tensor, and a copy of what it held."""
    python: PythonState

    @classmethod
    def of(cls, model: nn.Module, functions: Sequence[Any]) -> "ModelState":
        """The state now."""
        return cls(
            {name: (table, tensor, tensor.detach().clone()) for name, table, tensor in _tensors(model)},
            PythonState(model, *functions, owned=[*model.modules()]),
        )

    def changed(self) -> dict[str, str]:
        """By name, each state that has changed since, described with both values where they are short."""
        changed = {}
        for name, (table, tensor, before) in self.tensors.items():
            now = tensor if table is None else table.get(name.rpartition(".")[2])
            if now is not None and not _is_same(before, now):
                changed[name] = f"{name}{_values(before, now)}"
        return changed | {text.partition(" ")[0]: text for text in self.python.changed()}

    def restore(self) -> None:
        """Make everything what it was."""
        self.python.put_back()
        for name, (table, tensor, before) in self.tensors.items():
            if table is not None:
                table[name.rpartition(".")[2]] = tensor
            if not _is_same(before, tensor):
                tensor.data.copy_(before)  # .data: graphs that are alive must not call it modified


def _tensors(model: nn.Module) -> Iterator[tuple[str, dict[str, Tensor | None] | None, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, None, parameter
    for path, module in model.named_modules():
        for key, buffer in buffers_of(module).items():
            if buffer is not None:
                yield f"{path}.{key}" if path else key, buffers_of(module), buffer


def _is_same(before: Tensor, now: Tensor) -> bool:
    return before.shape == now.shape and bool(torch.equal(before.nan_to_num(), now.detach().nan_to_num()))


def _values(before: Tensor, now: Tensor) -> str:
    return f" ({before.item():g} -> {now.item():g})" if before.numel() == now.numel() == 1 else ""
