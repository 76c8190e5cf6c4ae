"""What an objective holds on to beside the model: parameters, modules, counters, generators. All of it is put back."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.objectives import Coupled, Objective
from anybatch.proof.cases.raised import is_below, raised
from anybatch.proof.python_state import PythonState


@dataclass(frozen=True, slots=True)
class ObjectiveState:
    """What the functions of an objective reach, as it was when this was made."""

    python: PythonState
    parameters: dict[str, nn.Parameter]
    """Of modules that they hold, and free ones; none of them the model's."""
    tensors: tuple[Tensor, ...]
    """These, and the buffers of the modules."""

    @contextmanager
    def fresh(self, dtype: torch.dtype | None) -> Iterator[None]:
        """The block in which everything is as it was at first, without gradients; raised to `dtype`, where there is one."""
        self.python.put_back()
        before = [(tensor, tensor.data) for tensor in self.tensors]
        grads = [(parameter, parameter.grad) for parameter in self.parameters.values()]
        try:
            for parameter, _ in grads:
                parameter.grad = None
            for tensor, data in before:
                if is_below(data.dtype, dtype):
                    tensor.data = raised(data, dtype)
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
    """What this objective of this model holds."""
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
