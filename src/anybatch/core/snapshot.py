"""`Snapshot`: what a forward or a step may change, as it was at one moment, to be put back."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.core.aside import kept_aside
from anybatch.core.disk import TensorFile
from anybatch.core.out_of_memory import free_memory
from anybatch.core.torch_private import NormLayer, buffers_of
from anybatch.core.torch_random import RandomState, random_state

Copy = Callable[[], Tensor]
"""What gives back a tensor as it was when the copy was made."""
Slot = tuple[nn.Module, str]
"""A module and the name of one of its buffers."""
Held = tuple[Tensor | None, Copy | None]
"""The tensor that was in a slot, and its copy; None where no copy was made, because nobody was seen to change it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Random draws, buffers, other tensors, an optimizer's state. One of nothing costs nothing and changes nothing."""

    random: RandomState | None = None
    buffers: Mapping[Slot, Held] = field(default_factory=dict)
    tensors: Sequence[tuple[Tensor, Copy]] = ()
    """Each with its copy: parameters, gradients, an optimizer's state, running statistics."""
    optimizer: "OptimizerTables | None" = None

    def put_back(self) -> None:
        """Make everything what it was."""
        if self.optimizer is not None:
            self.optimizer.put_back()
        with torch.no_grad():
            for tensor, copy in self.tensors:
                tensor.copy_(copy())
        for (module, name), (buffer, was) in self.buffers.items():
            buffers_of(module)[name] = buffer
            if buffer is not None and was is not None:
                # .data: what a graph has saved of this buffer is not to be called modified, it is what it was
                buffer.data.copy_(was())
        if self.random is not None:
            self.random.restore()


NOTHING = Snapshot()


@dataclass(frozen=True, slots=True)
class OptimizerTables:
    """Which state and options an optimizer held for which parameter. Its tensors are copied by `Snapshot.tensors`."""

    optimizer: Optimizer
    state: dict[Any, Any]
    groups: list[dict[str, Any]]

    def put_back(self) -> None:
        """Forget state that was made since, and put options back."""
        held = self.optimizer.state
        for key in [key for key in held if key not in self.state]:
            del held[key]
        for key, entries in self.state.items():
            held[key] = dict(entries) if isinstance(entries, dict) else entries
        for group, was in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.clear()
            group.update(was)
        free_memory()  # half-made state makes room for what is read back


def in_place(tensor: Tensor) -> Copy:
    """A copy beside the tensor, on its own device."""
    copy = tensor.detach().clone()
    return lambda: copy


def of_statistics(layers: Iterable[nn.Module]) -> Snapshot:
    """The running statistics of these layers."""
    return Snapshot(tensors=tuple((buffer, in_place(buffer)) for layer in layers for buffer in layer.buffers(False)))


def tracking_layers(model: nn.Module) -> list[nn.Module]:
    """BatchNorm and InstanceNorm layers that keep running statistics."""
    return [module for module in model.modules() if isinstance(module, NormLayer) and module.track_running_stats]


def tables_of(optimizer: Optimizer) -> OptimizerTables:
    """Which state and options the optimizer holds now; no tensor is copied."""
    state = {key: dict(held) if isinstance(held, dict) else held for key, held in optimizer.state.items()}
    return OptimizerTables(optimizer, state, [dict(group) for group in optimizer.param_groups])


def of_step(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Snapshot:
    """What a step changes: parameters, gradients, state, options, random draws. Copies lie where memory is not short."""
    tables = tables_of(optimizer)
    values = [value for held in tables.state.values() if isinstance(held, dict) for value in held.values()]
    gradients = [
        p.grad.detach() for p in parameters if p.grad is not None and not p.grad.is_sparse
    ]  # nesterov adds to them
    changing = [
        *(parameter.detach() for parameter in parameters),
        *gradients,
        *(value for value in values if isinstance(value, Tensor)),
    ]
    file = TensorFile()
    return Snapshot(
        random=random_state({parameter.device for parameter in parameters}),
        tensors=[(tensor, kept_aside(tensor, file)) for tensor in changing],
        optimizer=tables,
    )
