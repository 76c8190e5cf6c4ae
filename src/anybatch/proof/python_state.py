"""What Python code may change while a loss runs: attributes, variables, lists, generators; seen, and put back."""

import functools
import random
import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.torch_inside import buffers_of, num_writes

_PRIVATE = frozenset(vars(nn.Module()))
_SMALL = 2**16
_MOST = 2000
_DEEPEST = 5
_MOST_ITEMS = 100
_LIBRARIES = ("builtins", "torch", "logging", "numpy", "transformers", "functools", "threading", "re")
_CONTAINERS = (list, dict, set, deque)


class PythonState:
    """Everything that some modules and functions can reach by name, as it was when this was made.

    Attributes of modules and of objects, variables that functions close over, their defaults and attributes, globals that
    they name; of lists, dicts and sets what they hold; small tensors; generators; and of modules other than `owned` the
    buffers. What lies deeper, or outside, is not seen.
    """

    def __init__(self, *roots: Any, owned: Collection[nn.Module] = ()) -> None:
        self._owned = set(map(id, owned))
        self._seen: set[int] = set()
        self._slots: list[tuple[Any, str, Any, str]] = []
        self._held: list[tuple[Any, Any, str]] = []
        self._modes: list[tuple[nn.Module, bool]] = []
        self._tables: list[tuple[dict[str, Any], frozenset[str], str]] = []
        self.modules: dict[str, nn.Module] = {}
        """Those that are reached, and not owned."""
        self.iterators: list[str] = []
        """What hands out one thing after the other, and cannot be put back."""
        self.tables_of_numbers: dict[str, Tensor] = {}
        """Small tensors that a function names."""
        self.free_parameters: dict[str, nn.Parameter] = {}
        """Parameters that belong to no module."""
        for root in roots:
            self._visit(root, 0, "" if id(root) in self._owned else getattr(root, "__name__", "loss"))

    def changed(self) -> list[str]:
        """What is no longer what it was, by name; generators and the modes of modules are not among it."""
        slots = [
            f"{label}{_values(value, now)}"
            for owner, key, value, label in self._slots
            if not _is_same(now := _read(owner, key), value)
        ]
        held = [name for value, was, name in self._held if not _is_generator(value) and not _holds(value, was)]
        new = [f"{label}.{key} (new)".lstrip(".") for table, keys, label in self._tables for key in table.keys() - keys]
        return list(dict.fromkeys(slots + held + new))

    def moved_generators(self) -> list[str]:
        """The generators of Python and NumPy that were drawn from, by name."""
        outer = [entry for entry in self._held if _is_generator(entry[0]) and not isinstance(entry[0], torch.Generator)]
        return [name for value, was, name in outer if not _is_at(value, was)]

    def put_back(self) -> None:
        """Make everything what it was."""
        for module, mode in self._modes:
            if module.training != mode:
                module.training = mode
        for table, keys, _ in self._tables:
            for key in table.keys() - keys:
                del table[key]
        for owner, key, value, _ in self._slots:
            if _read(owner, key) is not value:
                _write(owner, key, value)
        for value, was, _ in self._held:
            if not _holds(value, was):
                _fill(value, was)

    def _visit(self, value: Any, depth: int, name: str) -> None:
        if id(value) in self._seen or depth > _DEEPEST or len(self._seen) > _MOST:
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            self._visit_module(value, depth, name)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, depth)
        elif isinstance(value, types.MethodType):
            self._visit(value.__self__, depth + 1, name)
            self._visit(value.__func__, depth + 1, name)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._visit(part, depth + 1, name)
        elif isinstance(value, _CONTAINERS) or _is_generator(value):
            self._visit_container(value, depth, name)
        elif isinstance(value, Tensor):
            self._visit_tensor(value, name)
        else:
            self._visit_object(value, depth, name)

    def _visit_object(self, value: Any, depth: int, name: str) -> None:
        if isinstance(value, Iterator):
            self.iterators.append(name)
        elif not isinstance(value, (type, types.ModuleType)) and _library(type(value)) not in _LIBRARIES:
            held = vars(value) if hasattr(value, "__dict__") else {}
            self._tables.append((held, frozenset(held), name))
            self._slot_all(value, dict(held), depth, name)
            kept = {key: item for key, item in vars(type(value)).items() if _is_plain(item) and key[:2] != "__"}
            self._slot_all(type(value), kept, depth, name)
            self._visit(vars(type(value)).get("__call__"), depth, name)

    def _visit_container(self, value: Any, depth: int, name: str) -> None:
        self._held.append((value, _contents(value), name))
        if isinstance(value, (list, dict, deque)) and len(value) <= _MOST_ITEMS:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in list(items):
                if not isinstance(item, Tensor) or isinstance(value, dict):
                    self._visit(item, depth + 1, f"{name}[{key!r}]")

    def _visit_tensor(self, value: Tensor, name: str) -> None:
        if isinstance(value, nn.Parameter):
            self.free_parameters[name] = value
        elif value.numel() <= _SMALL and not value.requires_grad and not value.is_inference():
            self._held.append((value, _contents(value), name))
            self.tables_of_numbers[name] = value

    def _visit_module(self, top: nn.Module, depth: int, name: str) -> None:
        if id(top) not in self._owned:
            self.modules[name] = top
        for path, module in top.named_modules():
            self._seen.add(id(module))
            self._modes.append((module, module.training))
            label = ".".join(part for part in (name, path) if part)
            own = {key: value for key, value in vars(module).items() if key not in _PRIVATE}
            if type(module).__module__.startswith("torch.nn."):
                # torch's own layers compute with constants; what others hang on them is a container
                own = {key: value for key, value in own.items() if isinstance(value, _CONTAINERS)}
            elif _library(type(module)) not in _LIBRARIES:
                self._visit(type(module).forward, depth + 1, label)
            self._tables.append((vars(module), frozenset(vars(module)), label))
            self._slot_all(module, own, depth, label)
            if id(top) not in self._owned:
                for key, buffer in buffers_of(module).items():
                    if buffer is not None:
                        self._slots.append((buffers_of(module), key, buffer, f"{label}.{key}".lstrip(".")))
                        self._held.append((buffer, _contents(buffer), f"{label}.{key}".lstrip(".")))

    def _visit_function(self, function: types.FunctionType, depth: int) -> None:
        if (function.__module__ or "").startswith(("torch.", "anybatch.batches.", "transformers.")):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # a variable that has no value yet
                continue
            self._slots.append((cell, name, value, name))
            self._visit(value, depth + 1, name)
        for name in _names(function.__code__):
            value = function.__globals__.get(name, _ABSENT)
            if _is_plain(value) or _can_change(value):
                self._slots.append((function.__globals__, name, value, name))
                self._visit(value, depth + 1, name)
        self._tables.append((vars(function), frozenset(vars(function)), function.__name__))
        self._slot_all(function, vars(function), depth, function.__name__)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._visit(value, depth + 1, f"a default of {function.__name__}")

    def _slot_all(self, owner: Any, held: Mapping[str, Any], depth: int, name: str) -> None:
        for key, value in held.items():
            label = f"{name}.{key}".lstrip(".")
            if not isinstance(value, nn.Module):
                self._slots.append((owner, key, value, label))
            self._visit(value, depth + 1, label)


_ABSENT = object()


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _library(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float, str, types.NoneType))


def _can_change(value: Any) -> bool:
    """True of a global that code may change, or that holds parameters: not of modules, classes and what libraries made."""
    if isinstance(value, (nn.Module, Tensor, types.FunctionType, *_CONTAINERS)) or _is_generator(value):
        return True
    return not isinstance(value, (type, types.ModuleType)) and _library(type(value)) not in (*_LIBRARIES, "typing")


def _read(owner: Any, name: str) -> Any:
    if isinstance(owner, types.CellType):
        return owner.cell_contents
    return owner.get(name, _ABSENT) if isinstance(owner, dict) else vars(owner).get(name, _ABSENT)


def _write(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, types.CellType):
        owner.cell_contents = value
    elif isinstance(owner, dict):
        owner[name] = value
    elif isinstance(owner, type):
        setattr(owner, name, value)
    else:
        object.__setattr__(owner, name, value)


def _is_same(one: Any, other: Any) -> bool:
    """By identity, or by value for plain ones: an attribute may be assigned what it was."""
    return one is other or (isinstance(one, (int, float, str)) and type(one) is type(other) and one == other)


def _values(before: Any, now: Any) -> str:
    """Both values where they are short."""
    if isinstance(before, Tensor) and before.numel() == 1 and isinstance(now, Tensor) and now.numel() == 1:
        return f" ({before.item():g} -> {now.item():g})"
    if isinstance(before, int | float | str) and isinstance(now, int | float | str):
        return f" ({before!r:.20} -> {now!r:.20})"
    return ""


def _is_generator(value: Any) -> bool:
    return isinstance(value, random.Random | torch.Generator) or hasattr(value, "bit_generator")


def _contents(value: Any) -> Any:
    if isinstance(value, Tensor):
        return num_writes(value), value.detach().clone()
    return _place_of(value) if _is_generator(value) else value.copy()


def _place_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state() if isinstance(generator, torch.Generator) else generator.bit_generator.state


def _is_at(generator: Any, was: Any) -> bool:
    return str(_place_of(generator)) == str(was)


def _holds(value: Any, was: Any) -> bool:
    """True where a container holds the same objects, a tensor was not written to; of generators, never."""
    if isinstance(value, Tensor):
        return num_writes(value) == was[0] or bool(torch.equal(value.detach().to(was[1].dtype), was[1]))
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
