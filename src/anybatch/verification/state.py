"""Copies to experiment on; state that the model and the loss keep beside parameters: read, compared, put back."""

import copy
import functools
import random
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anybatch.core import (
    Batch,
    Coupled,
    MovingBuffers,
    Objective,
    buffers_of,
    map_tensors,
    outer_random,
    version_of,
)
from anybatch.errors import VerifyError
from anybatch.verification.precision import LOWER, raised

Copy = Callable[[nn.Module], nn.Module]


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


def rounded_otherwise(model: nn.Module, make: Copy | None, unit: float) -> nn.Module:
    """Return a copy whose parameters are each off by a few units of roundoff."""
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


def functions_of(objective: Objective | Coupled) -> list[Any]:
    """All that an objective calls."""
    if isinstance(objective, Coupled):
        return [objective.encode, objective.loss, objective.units]
    return [objective.loss, objective.units, *(units for units in objective.terms.values() if units is not None)]


@dataclass(frozen=True, slots=True)
class ObjectiveState:
    """State that the functions of an objective reach, as it was when this was made."""

    python: "PythonState"
    parameters: dict[str, nn.Parameter]
    """Parameters of modules that they hold, and free ones; none of them the model's."""
    tensors: tuple[Tensor, ...]
    """These, and the buffers of the modules."""

    @classmethod
    def of(cls, objective: Objective | Coupled, model: nn.Module) -> "ObjectiveState":
        """Collect what this objective holds beside the model."""
        python = PythonState(*functions_of(objective), owned=[*model.modules()])
        own = set(map(id, model.parameters()))
        held = {
            f"{name}.{path}": parameter
            for name, module in python.modules.items()
            for path, parameter in module.named_parameters()
        } | python.free_parameters
        named = {name: parameter for name, parameter in held.items() if id(parameter) not in own}
        parameters = {id(parameter): (name, parameter) for name, parameter in reversed(named.items())}  # each once
        buffers = [buffer for module in python.modules.values() for buffer in module.buffers()]
        known = {id(tensor): tensor for tensor in (*named.values(), *buffers)}
        return cls(python, dict(reversed(parameters.values())), tuple(known.values()))

    @contextmanager
    def fresh(self, *, is_raised: bool) -> Iterator[None]:
        """Run a block from the first state, without gradients; in float64 if `is_raised`."""
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


@contextmanager
def leaving_untouched(model: nn.Module, objective: Objective | Coupled) -> Iterator[ObjectiveState]:
    """Restore gradients, buffers, all random states and what the objective holds when the block ends.

    Raises:
        VerifyError: If the objective used the model that it was made with, not the copy that it was given.
    """
    held = ObjectiveState.of(objective, model)
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in grads:
        parameter.grad = None  # so that copies have none, and what is there later was put there
    buffers, outer = MovingBuffers([model]), outer_random()
    before = buffers.snapshot()
    try:
        yield held
    finally:
        is_touched = any(parameter.grad is not None for parameter, _ in grads)
        for parameter, grad in grads:
            parameter.grad = grad
        held.python.put_back()
        buffers.put_back(before)
        outer.restore()
    if is_touched:
        raise VerifyError(
            f"the objective left gradients in the {type(model).__name__} that it was made with, not in the copy that it "
            "was given: it uses a model from outside. Write it as a function of its arguments: loss(model, batch)."
        )


_PRIVATE = frozenset(vars(nn.Module()))
_MOST_NUMBERS, _MOST_OBJECTS, _MOST_ITEMS, _DEEPEST = 2**16, 2000, 100, 5
_LIBRARIES = ("builtins", "torch", "logging", "numpy", "transformers", "functools", "threading", "re", "typing")
_NOT_THE_USERS = ("torch.", "anybatch.core.batch", "anybatch.core.splits", "anybatch.ragged", "transformers.")
_PLAIN = (int, float, str, types.NoneType)
_CONTAINERS = (list, dict, set, deque)
_ABSENT = object()


class _Held(NamedTuple):
    """A container, a namespace, a tensor or a random generator, and what it held."""

    value: Any
    was: Any
    label: str
    is_restored: bool
    has_names: bool = False
    """True of attributes and variables, which are told one by one."""


class PythonState:
    """State that some modules and functions reach by name, as it was when this was made.

    `changed` compares all of it. `put_back` restores what modules and callable objects hold: their attributes, the
    containers and small tensors in them, buffers of modules other than `owned`; and the position of random generators.
    Variables of closures, globals, default arguments, and attributes of functions and classes are compared and never
    written, whatever they hold: of functions that are not anybatch's own. Objects deeper than 5 steps are not seen.

    Args:
        roots: Modules and functions to start from.
        owned: Modules of the model, whose tensors somebody else restores.
        keeps_tensors: Copy and restore parameters and buffers of `owned` too.
    """

    def __init__(self, *roots: Any, owned: Collection[nn.Module] = (), keeps_tensors: bool = False) -> None:
        self._owned = set(map(id, owned))
        self._keeps_tensors = keeps_tensors
        self._seen: set[int] = set()
        self._held: list[_Held] = []
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
        found: dict[str, None] = {}
        for value, was, label, is_restored, has_names in self._held:
            if (is_left and is_restored) or _is_generator(value) or _holds(value, was):
                continue
            if not has_names:
                found[f"{label}{_values(was[1], value) if isinstance(value, Tensor) else ''}"] = None
                continue
            now = _read(value)
            for key in dict.fromkeys([*was, *now]):
                old, new = was.get(key, _ABSENT), now.get(key, _ABSENT)
                if key != "training" and not _is_same(old, new):
                    told = " (new)" if old is _ABSENT else _values(old, new)
                    found[f"{label}.{key}{told}".lstrip(".")] = None
        return list(found)

    def moved_generators(self) -> list[str]:
        """Names of the generators of Python and NumPy that were drawn from."""
        generators = [
            one for one in self._held if _is_generator(one.value) and not isinstance(one.value, torch.Generator)
        ]
        return [one.label for one in generators if str(_read(one.value)) != str(one.was)]

    def put_back(self) -> None:
        """Restore what modules and callable objects hold, and the position of random generators."""
        for value, was, _, is_restored, _ in self._held:
            if is_restored and not _holds(value, was):
                _fill(value, was)

    def _visit(self, value: Any, depth: int, name: str, is_restored: bool) -> None:
        if isinstance(value, (*_PLAIN, tuple)) or id(value) in self._seen:
            return
        if depth > _DEEPEST or len(self._seen) > _MOST_OBJECTS:
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            self._visit_module(value, depth, name)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, depth)
        elif isinstance(value, Tensor):
            self._visit_tensor(value, name, is_restored)
        elif isinstance(value, _CONTAINERS) or _is_generator(value):
            self._held.append(_Held(value, _read(value), name, is_restored or _is_generator(value)))
        elif isinstance(value, Iterator):
            self.iterators.append(name)
        elif _is_of_the_user(value):
            self._visit_names(getattr(value, "__dict__", {}), depth, name, is_restored)
            self._visit_names(type(value), depth, name, False)
            self._visit(vars(type(value)).get("__call__"), depth, name, False)
        for step, part in _parts(value):
            self._visit(part, depth + 1, name + step, is_restored)

    def _visit_names(self, value: Any, depth: int, label: str, is_restored: bool) -> None:
        self._held.append(_Held(value, was := _read(value), label, is_restored, has_names=True))
        for key, item in was.items():
            if key not in _PRIVATE:
                self._visit(item, depth + 1, f"{label}.{key}".lstrip("."), is_restored)

    def _visit_tensor(self, value: Tensor, name: str, is_restored: bool) -> None:
        if isinstance(value, nn.Parameter):
            self.free_parameters[name] = value
        elif value.numel() <= _MOST_NUMBERS and not value.requires_grad and not value.is_inference():
            self._held.append(_Held(value, _read(value), name, is_restored))
            self.tables_of_numbers[name] = value

    def _visit_module(self, top: nn.Module, depth: int, name: str) -> None:
        is_owned = id(top) in self._owned
        if not is_owned:
            self.modules[name] = top
        elif self._keeps_tensors:
            for path, parameter in top.named_parameters():
                self._held.append(_Held(parameter, (-1, parameter.detach().clone()), path, True))
        for path, module in top.named_modules():
            self._seen.add(id(module))
            label = ".".join(part for part in (name, path) if part)
            if _library(type(module)) not in _LIBRARIES:
                self._visit(type(module).forward, depth + 1, label, False)
            self._visit_names(vars(module), depth, label, True)
            if not is_owned or self._keeps_tensors:
                buffers = buffers_of(module)
                self._held.append(_Held(buffers, dict(buffers), label, True, has_names=True))
                for key, buffer in buffers.items():
                    if buffer is not None:
                        was = (-1, buffer.detach().clone()) if is_owned else _read(buffer)
                        self._held.append(_Held(buffer, was, f"{label}.{key}".lstrip("."), True))

    def _visit_function(self, function: types.FunctionType, depth: int) -> None:
        home = function.__module__ or ""
        if home.startswith(_NOT_THE_USERS):
            return
        is_ours = home.startswith("anybatch.")  # what `huggingface()` remembers is no state of the user's
        self._visit_names(function, depth, "", is_ours)
        self._visit_names(vars(function), depth, function.__name__, False)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._visit(value, depth + 1, f"a default of {function.__name__}", False)


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    """Parts of a bound method, of a partial, and of a small container."""
    if isinstance(value, types.MethodType):
        return [("", value.__self__), ("", value.__func__)]
    if isinstance(value, functools.partial):
        return [("", part) for part in (value.func, *value.args, *value.keywords.values())]
    if isinstance(value, dict) and len(value) <= _MOST_ITEMS:
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, list | deque) and len(value) <= _MOST_ITEMS:
        return [(f"[{key!r}]", item) for key, item in enumerate(value) if not isinstance(item, Tensor)]
    return ()


def _variables(function: types.FunctionType) -> dict[str, Any]:
    """The variables that a function closes over, and the globals that it names and that may change."""
    found: dict[str, Any] = {}
    for name in _names_in(function.__code__):
        value = function.__globals__.get(name, _ABSENT)
        can_change = isinstance(value, (nn.Module, Tensor, types.FunctionType, *_CONTAINERS, *_PLAIN))
        if can_change or _is_generator(value) or _is_of_the_user(value):
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


def _is_of_the_user(value: Any) -> bool:
    return not isinstance(value, (type, types.ModuleType)) and _library(type(value)) not in _LIBRARIES


def _is_generator(value: Any) -> bool:
    if isinstance(value, random.SystemRandom):  # it has no position
        return False
    return isinstance(value, random.Random | torch.Generator) or hasattr(value, "bit_generator")


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


def _read(value: Any) -> Any:
    """The numbers of a tensor, the position of a generator, the variables of a function, the items of a container."""
    if isinstance(value, Tensor):
        return version_of(value), value.detach().clone()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, types.FunctionType):
        return _variables(value)
    if isinstance(value, type):
        return {key: item for key, item in vars(value).items() if isinstance(item, _PLAIN) and key[:2] != "__"}
    return value.bit_generator.state if _is_generator(value) else value.copy()


def _holds(value: Any, was: Any) -> bool:
    """True if a container holds the same objects or a tensor the same numbers; of generators, never."""
    if isinstance(value, Tensor):
        num, numbers = was
        current = value.detach().to(numbers.dtype)
        return version_of(value) == num or bool(torch.equal(current.nan_to_num(), numbers.nan_to_num()))
    if _is_generator(value):
        return False
    now = value if isinstance(value, _CONTAINERS) else _read(value)
    if isinstance(now, dict):
        return now.keys() == was.keys() and all(_is_same(was[key], item) for key, item in now.items())
    return now == was if isinstance(now, set) else len(now) == len(was) and all(map(_is_same, was, now))


def _fill(value: Any, was: Any) -> None:
    if isinstance(value, Tensor):
        value.data.copy_(was[1])  # .data: graphs that are alive must not call it modified
    elif isinstance(value, random.Random):
        value.setstate(was)
    elif isinstance(value, torch.Generator):
        value.set_state(was)
    elif _is_generator(value):
        value.bit_generator.state = was
    elif isinstance(value, dict):
        for key in value.keys() - was.keys():
            del value[key]
        value.update(was)
    elif isinstance(value, _CONTAINERS):  # variables of functions stay
        value.clear()
        value.extend(was) if isinstance(value, list | deque) else value.update(was)
