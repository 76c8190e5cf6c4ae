"""What a forward may change beside its output: parameters, buffers, attributes, and what a loss holds on to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.proof.python_state import PythonState
from anybatch.torch_inside import buffers_of


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
