"""What a forward may change beside its output: parameters, buffers and attributes of modules, and what a loss holds on to."""

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.torch_inside import buffers_of, children_of

_PRIVATE = set(vars(nn.Module()))
"""What every module carries: its tables of parameters and buffers, its hooks."""

_RANDOM = ("numpy", "random")


@dataclass(frozen=True, slots=True)
class ModelState:
    """All state of a model at one moment, by the name of the parameter, buffer or attribute."""

    tensors: dict[str, tuple[Tensor, Tensor]]
    """The tensor that was held, and a copy of what it held."""
    attributes: dict[str, tuple[nn.Module, str, Any]]

    @classmethod
    def of(cls, model: nn.Module) -> "ModelState":
        """The state now."""
        return cls(
            {name: (tensor, tensor.detach().clone()) for name, tensor in _tensors(model)},
            {name: (module, key, _copied(value)) for name, module, key, value in _attributes(model)},
        )

    def changed(self, model: nn.Module) -> dict[str, str]:
        """By name, each state that has changed since, described with both values where they are short."""
        changed = {}
        now = dict(_tensors(model))
        for name, (_, before) in self.tensors.items():
            if name in now and not _same(before, now[name]):
                changed[name] = f"{name}{_values(before, now[name])}"
        for name, module, key, value in _attributes(model):
            if name not in self.attributes:
                changed[name] = f"{name} (new)"
            elif not _same(self.attributes[name][2], value):
                changed[name] = f"{name}{_values(self.attributes[name][2], getattr(module, key))}"
        return changed

    def generators(self) -> set[str]:
        """Attributes that are random generators of Python or NumPy."""
        return {
            name for name, (_, _, value) in self.attributes.items() if type(value).__module__.split(".")[0] in _RANDOM
        }

    def restore(self, model: nn.Module) -> None:
        """Make everything what it was."""
        for module in model.modules():
            for key in [key for key in vars(module) if key not in _PRIVATE and key not in children_of(module)]:
                if not any(held is module and key == name for held, name, _ in self.attributes.values()):
                    delattr(module, key)
        for module, key, value in self.attributes.values():
            object.__setattr__(module, key, _copied(value))
        for name, (tensor, before) in self.tensors.items():
            path, _, key = name.rpartition(".")
            owner = model.get_submodule(path)
            if key in buffers_of(owner):
                buffers_of(owner)[key] = tensor
            tensor.data.copy_(before)  # .data: graphs that are alive must not call it modified


def closure_state(function: Callable[..., Any]) -> dict[str, bytes]:
    """Variables that a function closes over, and may count in, as bytes; what cannot be pickled is passed over."""
    cells = getattr(function, "__closure__", None) or ()
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    state = {}
    for name, cell in zip(names, cells, strict=True):
        value = cell.cell_contents
        if not isinstance(value, nn.Module) and (frozen := _frozen(value)) is not None:
            state[name] = frozen
    return state


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _attributes(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in _PRIVATE and not isinstance(value, nn.Module):
                yield f"{path}.{key}" if path else key, module, key, value


def _copied(value: Any) -> Any:
    try:
        return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
    except Exception:  # what cannot be copied is taken not to change
        return value


def _same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        return before.shape == now.shape and bool(torch.equal(before.nan_to_num(), now.detach().nan_to_num()))
    try:
        if bool(before == now):
            return True
    except Exception:  # arrays have no one answer
        pass
    frozen = _frozen(before)
    return frozen is None or frozen == _frozen(now)


def _frozen(value: Any) -> bytes | None:
    try:
        return pickle.dumps(value)
    except Exception:  # hooks, locks, lambdas
        return None


def _values(before: Any, now: Any) -> str:
    if isinstance(before, Tensor) and before.numel() == 1 and isinstance(now, Tensor) and now.numel() == 1:
        return f" ({before.item():g} -> {now.item():g})"
    if isinstance(before, int | float | str) and isinstance(now, int | float | str):
        return f" ({before!r:.20} -> {now!r:.20})"
    return ""
