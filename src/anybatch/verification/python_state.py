"""Python state that a loss can reach by name: read before it runs and compared afterwards."""

import functools
import random
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anybatch.core import buffers_of, num_writes

_PRIVATE = frozenset(vars(nn.Module()))
_MOST_NUMBERS, _MOST_OBJECTS, _MOST_ITEMS, _DEEPEST = 2**16, 2000, 100, 5
_LIBRARIES = ("builtins", "torch", "logging", "numpy", "transformers", "functools", "threading", "re", "typing")
_CONTAINERS = (list, dict, set, deque)
_ABSENT = object()


class _Names(NamedTuple):
    """Names in one place (attributes of an object, variables of a function) and what they stood for."""

    read: Callable[[], Mapping[str, Any]]
    was: Mapping[str, Any]
    label: str
    is_restored: bool
    known: Collection[str] | None = None
    """All names that were there, where one more is a change."""


class _Contents(NamedTuple):
    """A container, a tensor or a random generator, and what it held."""

    value: Any
    was: Any
    label: str
    is_restored: bool


class PythonState:
    """Everything that some modules and functions can reach by name, as it was when this was made.

    `changed` compares all of it. `put_back` restores what modules and callable objects hold: their attributes, the
    containers and small tensors in them, buffers of modules other than `owned`; and the position of random generators.
    Variables of closures, globals, default arguments, and attributes of functions and classes are compared and never
    written, whatever they hold: of functions that are not anybatch's own. Objects deeper than 5 steps are not seen.
    """

    def __init__(self, *roots: Any, owned: Collection[nn.Module] = ()) -> None:
        self._owned = set(map(id, owned))
        self._seen: set[int] = set()
        self._names: list[_Names] = []
        self._contents: list[_Contents] = []
        self.modules: dict[str, nn.Module] = {}
        """Modules that are reached and not owned."""
        self.iterators: list[str] = []
        """Iterators; their position cannot be restored."""
        self.tables_of_numbers: dict[str, Tensor] = {}
        """Small tensors that a function names."""
        self.free_parameters: dict[str, nn.Parameter] = {}
        """Parameters that belong to no module."""
        for root in roots:
            self._visit(root, 0, "" if id(root) in self._owned else getattr(root, "__name__", "loss"), True)

    def changed(self, *, is_left: bool = False) -> list[str]:
        """Names of what is no longer what it was; with `is_left`, only of what `put_back` leaves as it is now.

        Random generators and the modes of modules are not among it.
        """
        found = []
        for read, was, label, is_restored, known in self._names:
            if not (is_left and is_restored):
                now = read()
                pairs = [(key, value, now.get(key, _ABSENT)) for key, value in was.items() if key != "training"]
                told = [f"{key}{_values(old, new)}" for key, old, new in pairs if not _is_same(old, new)]
                told += [f"{key} (new)" for key in now.keys() - known] if known is not None else []
                found += [f"{label}.{text}".lstrip(".") for text in told]
        found += [
            each.label
            for each in self._contents
            if not ((is_left and each.is_restored) or _is_generator(each.value) or _holds(each.value, each.was))
        ]
        return list(dict.fromkeys(found))

    def moved_generators(self) -> list[str]:
        """Names of the generators of Python and NumPy that were drawn from."""
        held = [
            one for one in self._contents if _is_generator(one.value) and not isinstance(one.value, torch.Generator)
        ]
        return [one.label for one in held if str(_copied(one.value)) != str(one.was)]

    def put_back(self) -> None:
        """Restore what modules and callable objects hold, and the position of random generators."""
        for read, was, _, is_restored, known in self._names:
            if is_restored:
                table: Any = read()
                for key in table.keys() - known if known is not None else ():
                    del table[key]
                table.update(was)
        for value, before, _, is_restored in self._contents:
            if is_restored and not _holds(value, before):
                _fill(value, before)

    def _visit(self, value: Any, depth: int, name: str, is_restored: bool) -> None:
        if id(value) in self._seen or depth > _DEEPEST or len(self._seen) > _MOST_OBJECTS:
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            self._visit_module(value, depth, name)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, depth)
        elif isinstance(value, types.MethodType | functools.partial):
            for part in _parts(value):
                self._visit(part, depth + 1, name, is_restored)
        elif isinstance(value, Tensor):
            self._visit_tensor(value, name, is_restored)
        elif isinstance(value, _CONTAINERS) or _is_generator(value):
            self._visit_container(value, depth, name, is_restored)
        elif isinstance(value, Iterator):
            self.iterators.append(name)
        elif not isinstance(value, (type, types.ModuleType)) and _library(type(value)) not in _LIBRARIES:
            held = vars(value) if hasattr(value, "__dict__") else {}
            self._add(lambda: held, dict(held), name, depth, is_restored, known=frozenset(held))
            shared = {key: item for key, item in vars(type(value)).items() if _is_plain(item) and key[:2] != "__"}
            self._add(lambda: vars(type(value)), shared, name, depth, False)
            self._visit(vars(type(value)).get("__call__"), depth, name, False)

    def _visit_tensor(self, value: Tensor, name: str, is_restored: bool) -> None:
        if isinstance(value, nn.Parameter):
            self.free_parameters[name] = value
        elif value.numel() <= _MOST_NUMBERS and not value.requires_grad and not value.is_inference():
            self._contents.append(_Contents(value, _copied(value), name, is_restored))
            self.tables_of_numbers[name] = value

    def _visit_container(self, value: Any, depth: int, name: str, is_restored: bool) -> None:
        self._contents.append(_Contents(value, _copied(value), name, is_restored or _is_generator(value)))
        if isinstance(value, list | dict | deque) and len(value) <= _MOST_ITEMS:
            for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
                if not isinstance(item, Tensor) or isinstance(value, dict):
                    self._visit(item, depth + 1, f"{name}[{key!r}]", is_restored)

    def _visit_module(self, top: nn.Module, depth: int, name: str) -> None:
        is_owned = id(top) in self._owned
        if not is_owned:
            self.modules[name] = top
        for path, module in top.named_modules():
            self._seen.add(id(module))
            label = ".".join(part for part in (name, path) if part)
            own = {key: value for key, value in vars(module).items() if key == "training" or key not in _PRIVATE}
            if type(module).__module__.startswith("torch.nn."):
                # torch's own layers compute with constants; what others hang on them is a container
                own = {key: one for key, one in own.items() if key == "training" or isinstance(one, _CONTAINERS)}
            elif _library(type(module)) not in _LIBRARIES:
                self._visit(type(module).forward, depth + 1, label, False)
            self._add(functools.partial(vars, module), own, label, depth, True, known=frozenset(vars(module)))
            buffers = {} if is_owned else {key: one for key, one in buffers_of(module).items() if one is not None}
            if buffers:
                self._names.append(_Names(functools.partial(buffers_of, module), buffers, label, True))
                self._contents += [
                    _Contents(buffer, _copied(buffer), f"{label}.{key}".lstrip("."), True)
                    for key, buffer in buffers.items()
                ]

    def _visit_function(self, function: types.FunctionType, depth: int) -> None:
        home = function.__module__ or ""
        if home.startswith(
            ("torch.", "anybatch.core.batch", "anybatch.core.splits", "anybatch.ragged", "transformers.")
        ):
            return
        is_ours = home.startswith("anybatch.")  # what `huggingface()` remembers is no state of the user's
        self._add(lambda: _variables(function), _variables(function), "", depth, is_ours)
        attributes = vars(function)
        self._add(lambda: attributes, dict(attributes), function.__name__, depth, False, known=frozenset(attributes))
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._visit(value, depth + 1, f"a default of {function.__name__}", False)

    def _add(
        self,
        read: Callable[[], Mapping[str, Any]],
        was: Mapping[str, Any],
        label: str,
        depth: int,
        is_restored: bool,
        known: Collection[str] | None = None,
    ) -> None:
        named = {key: value for key, value in was.items() if not isinstance(value, nn.Module)}
        self._names.append(_Names(read, named, label, is_restored, known))
        for key, value in was.items():
            self._visit(value, depth + 1, f"{label}.{key}".lstrip("."), is_restored)


def _parts(value: Any) -> tuple[Any, ...]:
    """The parts of a bound method, or of a partial."""
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    return value.func, *value.args, *value.keywords.values()


def _variables(function: types.FunctionType) -> dict[str, Any]:
    """The variables that a function closes over, and the globals that it names and that may change."""
    found: dict[str, Any] = {}
    for name in _names_in(function.__code__):
        value = function.__globals__.get(name, _ABSENT)
        if _is_plain(value) or _can_change(value):
            found[name] = value
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue
    return found


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _library(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float, str, types.NoneType))


def _can_change(value: Any) -> bool:
    """True of a global that code may change, or that holds parameters: not of modules, classes and what libraries made."""
    if isinstance(value, (nn.Module, Tensor, types.FunctionType, *_CONTAINERS)) or _is_generator(value):
        return True
    return not isinstance(value, (type, types.ModuleType)) and _library(type(value)) not in _LIBRARIES


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
    if isinstance(value, random.SystemRandom):  # it has no position
        return False
    return isinstance(value, random.Random | torch.Generator) or hasattr(value, "bit_generator")


def _copied(value: Any) -> Any:
    """The numbers of a tensor, the position of a generator, the items of a container."""
    if isinstance(value, Tensor):
        return num_writes(value), value.detach().clone()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.bit_generator.state if _is_generator(value) else value.copy()


def _holds(value: Any, was: Any) -> bool:
    """True if a container holds the same objects or a tensor was not written to; of generators, never."""
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
