"""Copies to experiment on, and the promise that what the user gave is left as it was."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from anybatch.batches import Batch, map_tensors
from anybatch.errors import VerifyError
from anybatch.gradients import check_hooks
from anybatch.objectives import Coupled, Objective
from anybatch.state import outer_random, random_state
from anybatch.torch_inside import num_writes

Copy = Callable[[nn.Module], nn.Module]


def copy_model(model: nn.Module, make: Copy | None = None) -> nn.Module:
    """Another model with the same weights and state, and no gradients; `make` for models that deepcopy refuses.

    Copies lose the hooks on parameters, and would be exact where the model is not: hooks are refused.
    """
    check_hooks(model.parameters(), model.named_parameters, num_passes=2)
    try:
        twin = copy.deepcopy(model) if make is None else make(model)
    except Exception as error:
        raise VerifyError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {str(error)[:200]}), and verifying must "
            "not touch yours. Give copy=, a function of the model that returns another one with the same weights, for "
            "example copy=lambda model: load(build(), model.state_dict())."
        ) from error
    if not isinstance(twin, nn.Module) or twin is model:
        raise VerifyError(
            f"copy(model) returned {'the model itself' if twin is model else type(twin).__name__}; expected another "
            "torch.nn.Module with the same weights."
        )
    if not {id(parameter) for parameter in twin.parameters()}.isdisjoint(map(id, model.parameters())):
        raise VerifyError("copy(model) shares parameters with the model; expected one with parameters of its own.")
    twin.zero_grad(set_to_none=True)
    return twin


def copy_objective(objective: Objective | Coupled) -> Objective | Coupled:
    """The objective with a copy of the loss, where that is a module that may hold parameters or state."""
    if isinstance(objective.loss, nn.Module):
        return replace(objective, loss=copy.deepcopy(objective.loss))  # type: ignore[arg-type]
    return objective


def copy_batch(batch: Batch) -> Batch:
    """The batch with tensors of its own."""
    return map_tensors(batch, lambda tensor: tensor.detach().clone())


@contextmanager
def leaving_untouched(model: nn.Module, objective: Objective | Coupled) -> Iterator[None]:
    """The block after which gradients, buffers and all random states are what they were before.

    An objective that reaches for the model it was made with, not the one that it is given, is told so.
    """
    held = [*model.parameters(), *objective.parameters()]
    grads = [parameter.grad for parameter in held]
    versions = [None if grad is None else num_writes(grad) for grad in grads]
    copies = [None if grad is None else grad.detach().clone() for grad in grads]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {tensor.device for tensor in (*held, *model.buffers())}
    states = random_state(devices), outer_random()
    try:
        yield
    finally:
        for state in states:
            state.restore()
        is_touched = _put_back(held, grads, versions, copies)
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
    if is_touched:
        raise VerifyError(
            f"the objective left gradients in the {type(model).__name__} that it was made with, not in the copy that it "
            "was given: it uses a model from outside. Write it as a function of its arguments: loss(model, batch)."
        )


def _put_back(
    held: list[nn.Parameter], grads: list[Tensor | None], versions: list[int | None], copies: list[Tensor | None]
) -> bool:
    is_touched = False
    for parameter, grad, version, before in zip(held, grads, versions, copies, strict=True):
        if parameter.grad is not grad or (grad is not None and num_writes(grad) != version):
            is_touched = True
            parameter.grad = grad
            if grad is not None and before is not None:
                grad.copy_(before)
    return is_touched
