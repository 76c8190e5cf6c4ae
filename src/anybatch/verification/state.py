"""Copies of the model and the batch, and snapshots of the Python state that a loss reaches."""

import copy
import random
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anybatch.core import Batch, Coupled, MovingBuffers, Objective, buffers_of, map_tensors, outer_random
from anybatch.errors import VerifyError
from anybatch.verification.precision import raised

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


def copy_with_noise(model: nn.Module, make: Copy | None, unit: float) -> nn.Module:
    """Return a copy with every parameter off by a few units of roundoff."""
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
    return map_tensors(batch, lambda tensor: tensor.detach().clone())


def functions_of(objective: Objective | Coupled) -> list[Any]:
    """Return everything that an objective calls."""
    if isinstance(objective, Coupled):
        return [objective.encode, objective.loss, objective.units]
    return [objective.loss, objective.units, *(units for units in objective.terms.values() if units is not None)]


@contextmanager
def leaving_untouched(model: nn.Module, objective: Objective | Coupled) -> Iterator["PythonState"]:
    """Restore gradients, buffers, all random states and what the objective holds when the block ends.

    Raises:
        VerifyError: If the objective used the model that it was made with, not the copy that it was given.
    """
    held = PythonState(*functions_of(objective), owned=[*model.modules()])
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in grads:
        parameter.grad = None  # any gradient found later was left by the objective
    buffers, outer = MovingBuffers([model]), outer_random()
    before = buffers.snapshot()
    try:
        yield held
    finally:
        is_touched = any(parameter.grad is not None for parameter, _ in grads)
        for parameter, grad in grads:
            parameter.grad = grad
        held.put_back()
        buffers.put_back(before)
        outer.restore()
    if is_touched:
        raise VerifyError(
            f"the objective left gradients in the {type(model).__name__} that it was made with, not in the copy that it "
            "was given: it uses a model from outside. Write it as a function of its arguments: loss(model, batch)."
        )


_MODULE_FIELDS = frozenset(vars(nn.Module()))
_MOST_NUMBERS, _MOST_OBJECTS, _MOST_ITEMS, _DEEPEST = 2**16, 2000, 100, 5
_LIBRARIES = ("builtins", "torch", "logging", "numpy", "transformers", "functools", "threading", "re", "typing")
_STATELESS = ("torch.", "transformers.", "anybatch.core.batch", "anybatch.core.splits", "anybatch.ragged")
_PLAIN = (int, float, str, types.NoneType)
_CONTAINERS = (list, dict, set, deque)
_ABSENT = object()


class _Slot(NamedTuple):
    """A namespace, container, tensor or generator, and its content at the time of the snapshot."""

    label: str
    read: Callable[[], Any]
    write: Callable[[Any], object] | None
    """None if it is only compared."""
    was: Any


class PythonState:
    """Snapshot of the Python state that modules and functions reach by name.

    `changed` compares all of it. `put_back` restores attributes of modules and of callable objects, the containers and small
    tensors in them, buffers of modules that are not `owned`, and random generators. Variables of closures, globals, default
    arguments, and attributes of functions and classes are compared and never written. Objects more than 5 steps away are
    not seen.

    Args:
        roots: Modules and functions to start from.
        owned: Modules of the model; their tensors are restored by other means.
        keeps_tensors: Copy and restore parameters and buffers of `owned` too.
    """

    def __init__(self, *roots: Any, owned: Collection[nn.Module] = (), keeps_tensors: bool = False) -> None:
        self._owned = set(map(id, owned))
        self._keeps_tensors = keeps_tensors
        self._seen: set[int] = set()
        self._slots: list[_Slot] = []
        self._generators: list[_Slot] = []
        self._modules: dict[str, nn.Module] = {}
        """Modules that are reached and not owned."""
        self.iterators: list[str] = []
        """Names of iterators; their position cannot be restored."""
        self.small_tensors: dict[str, Tensor] = {}
        """Small tensors that a function names."""
        self.parameters: dict[str, nn.Parameter] = {}
        """Parameters of modules that are not owned, and parameters of no module."""
        for root in roots:
            self._visit(root, 0, "" if id(root) in self._owned else getattr(root, "__name__", "loss"), True)
        held = [(f"{top}.{name}", one) for top, part in self._modules.items() for name, one in part.named_parameters()]
        names = {parameter: name for name, parameter in reversed([*held, *self.parameters.items()])}  # the first name
        for parameter in [parameter for module in owned for parameter in module.parameters(recurse=False)]:
            names.pop(parameter, None)
        self.parameters = {name: parameter for parameter, name in reversed(names.items())}

    def changed(self, *, is_left: bool = False) -> list[str]:
        """Name the state that differs from the snapshot, except generators and training modes.

        With `is_left`, name only the state that `put_back` does not restore.
        """
        found: dict[str, None] = {}
        for label, read, write, was in self._slots:
            now = was if is_left and write is not None else read()
            for key in dict.fromkeys([*was, *now]):
                old, new = was.get(key, _ABSENT), now.get(key, _ABSENT)
                if key != "training" and not _is_same(old, new):
                    values = " (new)" if old is _ABSENT else _short_values(old, new)
                    found[f"{label}.{key}".strip(".") + values] = None
        return list(found)

    def moved_generators(self) -> list[str]:
        """Name the generators of Python and NumPy that were drawn from."""
        known = [slot for slot in self._generators if not isinstance(slot.was, Tensor)]
        return [slot.label for slot in known if str(slot.read()) != str(slot.was)]

    def put_back(self) -> None:
        """Restore what modules and callable objects hold, and the position of random generators."""
        for slot in (*self._slots, *self._generators):
            if slot.write is not None and not _is_same(slot.was, slot.read()):
                slot.write(slot.was)

    @contextmanager
    def fresh(self, *, is_raised: bool) -> Iterator[None]:
        """Run a block from the snapshot, without gradients; in float64 if `is_raised`."""
        self.put_back()
        buffers = [buffer for module in self._modules.values() for buffer in module.buffers()]
        before = [(tensor, tensor.data) for tensor in dict.fromkeys([*self.parameters.values(), *buffers])]
        grads = [(parameter, parameter.grad) for parameter in self.parameters.values()]
        try:
            for parameter, _ in grads:
                parameter.grad = None
            for tensor, data in before:
                if is_raised:
                    tensor.data = raised(data)
            yield
        finally:
            for parameter, _ in grads:
                parameter.grad = None  # it may be float64
            for tensor, data in before:
                tensor.data = data
            for parameter, grad in grads:
                parameter.grad = grad
            self.put_back()

    def _visit(self, value: Any, depth: int, name: str, is_restored: bool) -> None:
        is_known = isinstance(value, (*_PLAIN, tuple)) or id(value) in self._seen
        if is_known or depth > _DEEPEST or len(self._seen) > _MOST_OBJECTS:
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            self._visit_module(value, depth, name)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, depth)
        elif isinstance(value, nn.Parameter):
            self.parameters[name] = value
        elif isinstance(value, (Tensor, *_CONTAINERS)):
            self._add_value(value, name, is_restored)
        elif (access := _generator_access(value)) is not None:
            self._generators.append(_Slot(name, *access, access[0]()))
        elif isinstance(value, Iterator):
            self.iterators.append(name)
        elif _is_of_the_user(value):
            self._add_names(lambda: getattr(value, "__dict__", {}), depth, name, is_restored)
            self._add_names(lambda: _class_attributes(type(value)), depth, name, False)
            self._visit(vars(type(value)).get("__call__"), depth, name, False)
        for step, part in _parts(value):
            self._visit(part, depth + 1, name + step, is_restored)

    def _visit_module(self, top: nn.Module, depth: int, name: str) -> None:
        is_owned = id(top) in self._owned
        if not is_owned:
            self._modules[name] = top
        elif self._keeps_tensors:
            for path, parameter in top.named_parameters():
                self._add_value(parameter, path, True, of_module=True)
        for path, module in top.named_modules():
            self._seen.add(id(module))
            label = f"{name}.{path}".strip(".")
            if _is_of_the_user(module):
                self._visit(type(module).forward, depth + 1, label, False)
            self._add_names(partial(getattr, module, "__dict__"), depth, label, True)
            if not is_owned or self._keeps_tensors:
                buffers = buffers_of(module)
                self._slots.append(_Slot(label, partial(buffers_of, module), partial(_refill, buffers), dict(buffers)))
                for key, buffer in buffers.items():
                    if buffer is not None:
                        self._add_value(buffer, f"{label}.{key}".lstrip("."), True, of_module=True)

    def _visit_function(self, function: types.FunctionType, depth: int) -> None:
        home = function.__module__ or ""
        if home.startswith(_STATELESS):
            return
        is_ours = home.startswith("anybatch.")  # the memory of `huggingface()` is not the user's state
        self._add_names(lambda: _variables(function), depth, "", is_ours)
        self._add_names(lambda: vars(function), depth, function.__name__, False)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._visit(value, depth + 1, f"a default of {function.__name__}", False)

    def _add_names(self, read: Callable[[], dict[str, Any]], depth: int, label: str, is_restored: bool) -> None:
        was = dict(read())
        self._slots.append(_Slot(label, read, (lambda was: _refill(read(), was)) if is_restored else None, was))
        for key, item in was.items():
            if key not in _MODULE_FIELDS:
                self._visit(item, depth + 1, f"{label}.{key}".lstrip("."), is_restored)

    def _add_value(self, value: Any, label: str, is_restored: bool, *, of_module: bool = False) -> None:
        """Add one container or small tensor, as a namespace with the name ""."""
        if isinstance(value, Tensor) and not of_module:
            if value.numel() > _MOST_NUMBERS or value.requires_grad or value.is_inference():
                return
            self.small_tensors[label] = value
        was = value.detach().clone() if isinstance(value, Tensor) else value.copy()
        write = (lambda names: _refill(value, names[""])) if is_restored else None
        self._slots.append(_Slot(label, lambda: {"": value}, write, {"": was}))


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Return the parts of a bound method, a partial or a small container, each with its step of the path."""
    if isinstance(value, types.MethodType):
        return [("", value.__self__), ("", value.__func__)]
    if isinstance(value, partial):
        return [("", part) for part in (value.func, *value.args, *value.keywords.values())]
    if isinstance(value, dict) and len(value) <= _MOST_ITEMS:
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, list | deque) and len(value) <= _MOST_ITEMS:
        return [(f"[{key!r}]", item) for key, item in enumerate(value) if not isinstance(item, Tensor)]
    return []


def _variables(function: types.FunctionType) -> dict[str, Any]:
    """Return the variables that a function closes over, and the globals that it names and that may change."""
    found: dict[str, Any] = {}
    for name in _names_in(function.__code__):
        value = function.__globals__.get(name, _ABSENT)
        can_change = isinstance(value, (nn.Module, Tensor, types.FunctionType, *_CONTAINERS, *_PLAIN))
        if can_change or _generator_access(value) is not None or _is_of_the_user(value):
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


def _class_attributes(kind: type) -> dict[str, Any]:
    return {key: item for key, item in vars(kind).items() if isinstance(item, _PLAIN) and key[:2] != "__"}


def _is_of_the_user(value: Any) -> bool:
    library = type(value).__module__.partition(".")[0]
    return not isinstance(value, (type, types.ModuleType)) and library not in _LIBRARIES


def _generator_access(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """Return the functions that read and write a random generator's state; None if `value` is no generator."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else (value.getstate, value.setstate)
    if hasattr(value, "bit_generator"):
        return lambda: value.bit_generator.state, lambda state: setattr(value.bit_generator, "state", state)
    return None


def _is_same(one: Any, other: Any) -> bool:
    """Compare plain values, tensors and containers by value, everything else by identity."""
    if isinstance(one, Tensor) and isinstance(other, Tensor) and one is not other:
        return bool(torch.equal(one.nan_to_num(), other.detach().to(one.dtype).nan_to_num()))
    if one is other or type(one) is not type(other) or not isinstance(one, (*_PLAIN, *_CONTAINERS)):
        return one is other
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | deque):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)


def _short_values(before: Any, now: Any) -> str:
    """Return both values where they are short."""
    if isinstance(before, Tensor) and before.numel() == 1 and isinstance(now, Tensor) and now.numel() == 1:
        return f" ({before.item():g} -> {now.item():g})"
    if isinstance(before, int | float | str) and isinstance(now, int | float | str):
        return f" ({before!r:.20} -> {now!r:.20})"
    return ""


def _refill(value: Any, was: Any) -> None:
    if isinstance(value, Tensor):
        value.data.copy_(was)  # through .data, so that live graphs do not count it as a modification
    elif isinstance(value, dict):  # never empty, because other threads may read it
        for key in value.keys() - was.keys():
            del value[key]
        value.update(was)
    else:
        value.clear()
        value.update(was) if isinstance(value, set) else value.extend(was)
