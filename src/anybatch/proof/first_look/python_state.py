"""What Python code may change while a loss runs: attributes, variables, lists, generators; seen, and put back."""

import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.torch_inside import num_writes

_PRIVATE = frozenset(vars(nn.Module()))
_SMALL = 2**16
_MOST = 2000
Restore = Callable[[], None]


class PythonState:
    """Everything that some modules and functions can reach by name, as it was when this was made.

    Attributes of modules and of objects, variables that functions close over, globals that they name; of lists, dicts and sets
    what they hold; small tensors; generators. What lies deeper, or outside, is not seen.
    """

    def __init__(self, *roots: Any) -> None:
        self._seen: set[int] = set()
        self._slots: list[tuple[Any, str, Any]] = []
        self._held: list[tuple[Any, Any, str]] = []
        self._modes: list[tuple[nn.Module, bool]] = []
        for root in roots:
            self._visit(root, 0, getattr(root, "__name__", type(root).__name__))

    def changed(self) -> list[str]:
        """The names of what is no longer what it was; generators and the modes of modules are not among them."""
        slots = [name for owner, name, value in self._slots if not _is_same(_read(owner, name), value)]
        held = [name for value, was, name in self._held if not _is_generator(value) and not _holds(value, was)]
        return slots + held

    def put_back(self) -> None:
        """Make everything what it was."""
        for module, mode in self._modes:
            if module.training != mode:
                module.training = mode
        for owner, name, value in self._slots:
            if _read(owner, name) is not value:
                _write(owner, name, value)
        for value, was, _ in self._held:
            if not _holds(value, was):
                _fill(value, was)

    def _visit(self, value: Any, depth: int, name: str) -> None:
        if id(value) in self._seen or depth > 5 or len(self._seen) > _MOST:
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            self._visit_module(value, depth, name)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, depth)
        elif isinstance(value, types.MethodType):
            self._visit(value.__self__, depth + 1, name)
            self._visit(value.__func__, depth + 1, name)
        elif isinstance(value, (list, dict, set, deque)) or _is_generator(value):
            self._held.append((value, _contents(value), name))
        elif isinstance(value, Tensor):
            if value.numel() <= _SMALL and not value.requires_grad and not value.is_inference():
                self._held.append((value, _contents(value), name))
        elif not isinstance(value, type) and type(value).__module__ not in ("builtins", "torch"):
            self._slot_all(value, vars(value) if hasattr(value, "__dict__") else {}, depth, name)

    def _visit_module(self, top: nn.Module, depth: int, name: str) -> None:
        for path, module in top.named_modules():
            self._seen.add(id(module))
            self._modes.append((module, module.training))
            own = {key: value for key, value in vars(module).items() if key not in _PRIVATE}
            if type(module).__module__.startswith("torch.nn."):
                # torch's own layers compute with constants; what others hang on them is a container
                own = {key: value for key, value in own.items() if isinstance(value, (list, dict, set, deque))}
            self._slot_all(module, own, depth, path or name)

    def _visit_function(self, function: types.FunctionType, depth: int) -> None:
        if (function.__module__ or "").startswith(("torch.", "anybatch.batches.")):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # a variable that has no value yet
                continue
            self._slots.append((cell, name, value))
            self._visit(value, depth + 1, name)
        for name in _names(function.__code__):
            value = function.__globals__.get(name, _ABSENT)
            if isinstance(value, (int, float, str, list, dict, set, deque, types.FunctionType)) or _is_generator(value):
                self._slots.append((function.__globals__, name, value))
                self._visit(value, depth + 1, name)

    def _slot_all(self, owner: Any, held: Mapping[str, Any], depth: int, name: str) -> None:
        for key, value in held.items():
            if not isinstance(value, nn.Module):
                self._slots.append((owner, key, value))
            self._visit(value, depth + 1, f"{name}.{key}")


_ABSENT = object()


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _read(owner: Any, name: str) -> Any:
    if isinstance(owner, types.CellType):
        return owner.cell_contents
    return owner.get(name, _ABSENT) if isinstance(owner, dict) else vars(owner).get(name, _ABSENT)


def _write(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, types.CellType):
        owner.cell_contents = value
    elif isinstance(owner, dict):
        owner[name] = value
    else:
        object.__setattr__(owner, name, value)


def _is_same(one: Any, other: Any) -> bool:
    """By identity, or by value for plain ones: an attribute may be assigned what it was."""
    return one is other or (isinstance(one, (int, float, str)) and type(one) is type(other) and one == other)


def _is_generator(value: Any) -> bool:
    return isinstance(value, random.Random | torch.Generator) or hasattr(value, "bit_generator")


def _contents(value: Any) -> Any:
    if isinstance(value, Tensor):
        return num_writes(value), value.detach().clone()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.bit_generator.state if _is_generator(value) else value.copy()


def _holds(value: Any, was: Any) -> bool:
    """True where a container holds the same objects, a tensor was not written to; of generators, never."""
    if isinstance(value, Tensor):
        return bool(num_writes(value) == was[0])
    if _is_generator(value) or len(value) != len(was):
        return False
    if isinstance(value, dict):
        return all(key in was and was[key] is item for key, item in value.items())
    return value == was if isinstance(value, set) else all(a is b for a, b in zip(value, was, strict=True))


def _fill(value: Any, was: Any) -> None:
    if isinstance(value, Tensor):
        value.data.copy_(was[1])
    elif isinstance(value, random.Random):
        value.setstate(was)
    elif isinstance(value, torch.Generator):
        value.set_state(was)
    elif _is_generator(value):
        value.bit_generator.state = was
    else:
        value.clear()
        value.extend(was) if isinstance(value, list | deque) else value.update(was)
