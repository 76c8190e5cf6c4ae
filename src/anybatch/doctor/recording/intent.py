"""What the user's variables say: how many micro-batches and epochs are meant, and which variable keeps graphs alive."""

import linecache
import re
from collections.abc import Iterator, Mapping
from types import FrameType, ModuleType
from typing import Any

from torch import Tensor

from anybatch.doctor.recording.places import user_frames

STEPS = re.compile(
    r"accum|grad(ient)?_acc|^acc_?steps|^n_?acc|^accum|^ga_steps|num_micro|n_micro|micro_batches|^n_accum", re.I
)
NOT_STEPS = re.compile(
    r"size|loss|total|count|step_?count|idx|index|rows|seen|num_accumulated|accumulated|correct", re.I
)
EPOCHS = re.compile(r"^(num_?|n_?|max_?|total_?)?(train_?)?epochs?$|num_train_epochs|epochs_total", re.I)
MOST_NAMES = 400


def intended() -> dict[str, dict[str, int]]:
    """Whole numbers in the user's frames, by what their names say; a guess."""
    steps: dict[str, int] = {}
    epochs: dict[str, int] = {}
    for frame in user_frames():
        for name, value in _names(frame):
            if STEPS.search(name) and not NOT_STEPS.search(name) and 1 <= value <= 4096:
                steps.setdefault(name, value)
            if EPOCHS.search(name) and name.lower() != "epoch" and 1 <= value <= 100_000:
                epochs.setdefault(name, value)
    return {"steps": steps, "epochs": epochs, "lengths": _lengths()}


def _lengths() -> dict[str, int]:
    """Of the user's lists, which may hold batches."""
    found: dict[str, int] = {}
    for frame in user_frames():
        for name, value in list(frame.f_locals.items())[:MOST_NAMES]:
            if isinstance(value, list | tuple) and len(value) > 3 and not name.startswith("_"):
                found.setdefault(name, len(value))
    return found


def _names(frame: FrameType) -> Iterator[tuple[str, int]]:
    for scope in (frame.f_locals, frame.f_globals):
        for name, value in list(scope.items())[:MOST_NAMES]:
            if isinstance(value, int) and not isinstance(value, bool):
                yield name, value
            elif not name.startswith("__") and not isinstance(value, Tensor | ModuleType | type):
                yield from _fields(value)


def _fields(value: Any) -> Iterator[tuple[str, int]]:
    """Of a dict, a namespace, a config object."""
    fields = value if isinstance(value, Mapping) else getattr(value, "__dict__", None)
    if isinstance(fields, Mapping) and len(fields) <= MOST_NAMES:
        for name, inner in list(fields.items()):
            if isinstance(name, str) and isinstance(inner, int) and not isinstance(inner, bool):
                yield name.lstrip("_"), inner


def keeper(current: Tensor) -> tuple[str, str, int]:
    """The variable of the user's that most likely keeps the graphs of earlier losses, and where it is added to."""
    best, found = 0, ("", "", 0)
    for frame in user_frames():
        for name, value in [*frame.f_locals.items(), *frame.f_globals.items()][:MOST_NAMES]:
            held = _held(value, current)
            if held > best:
                best, found = held, (name, *_added_to(name, frame.f_code.co_filename))
    return found


def _added_to(name: str, filename: str) -> tuple[str, int]:
    """The line on which a variable grows; 0 where none looks like it."""
    word = re.escape(name)
    grows = re.compile(
        rf"\b{word}\s*\+=|\b{word}\s*=[^=].*\b{word}\b|\b{word}(\[[^]]*\])?\.(append|extend|add|update|setdefault)\(|\b{word}\["
    )
    lines = linecache.getlines(filename)
    return filename, next((number for number, line in enumerate(lines, 1) if grows.search(line.partition("#")[0])), 0)


def _held(value: Any, current: Tensor) -> int:
    if isinstance(value, Tensor):
        return 1 if value is not current and value.grad_fn is not None and value.numel() == 1 else 0
    if isinstance(value, Mapping) and len(value) < MOST_NAMES:
        value = list(value.values())
    if isinstance(value, list | tuple) or type(value).__name__ == "deque":
        return sum(_held(item, current) for item in list(value)[:1000] if isinstance(item, Tensor | list | tuple))
    return 0
