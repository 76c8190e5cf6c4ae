"""Copies to experiment on, and the promise that what the user gave is left as it was."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import nn

from anybatch.batches import Batch, map_tensors
from anybatch.errors import VerifyError
from anybatch.objectives import Coupled, Objective
from anybatch.proof.cases.objective_state import ObjectiveState, objective_state
from anybatch.state import outer_random, random_state

Copy = Callable[[nn.Module], nn.Module]


def copy_model(
    model: nn.Module, make: Copy | None = None, *, known: Mapping[int, object] = MappingProxyType({})
) -> nn.Module:
    """Another model with the same weights, state and modes, and no gradients; `make` for models that deepcopy refuses.

    `known` has what stands for some of its tensors in the copy, by their id.
    """
    try:
        twin = copy.deepcopy(model, dict(known)) if make is None else make(model)
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
def leaving_untouched(
    model: nn.Module, objective: Objective | Coupled, put_back: Callable[[], None] | None = None
) -> Iterator[ObjectiveState]:
    """The block after which gradients, buffers, all random states and what the objective holds are what they were before.

    Buffers are copied, unless `put_back` makes them, and all weights, what they were.
    An objective that reaches for the model it was made with, not the one that it is given, is told so.
    """
    held = objective_state(objective, model)
    parameters = [*model.parameters()]
    grads = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None  # so that copies have none, and what is there later was put there
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers() if put_back is None]
    devices = {tensor.device for tensor in (*parameters, *model.buffers())}
    states = random_state(devices), outer_random()
    try:
        yield held
    finally:
        is_touched = any(parameter.grad is not None for parameter in parameters)
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        held.python.put_back()
        if put_back is not None:
            put_back()
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
