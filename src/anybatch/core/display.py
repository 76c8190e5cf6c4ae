"""Objects in one line: what they were made with, or what they found, without tensors poured out."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import partial
from typing import Any

LONGEST = 60
"""Characters of one value."""
MOST = 6
"""Members of one container."""


def called(name: str, *parts: str, **options: Any) -> str:
    """`Name(part, part, option=value)`.

    >>> called("Update", "Linear", "SGD", clip_norm=1.0)
    'Update(Linear, SGD, clip_norm=1)'
    """
    return f"{name}({', '.join([*parts, *(f'{key}={short(value)}' for key, value in options.items())])})"


def name_of(value: Any) -> str:
    """A function by its name, anything else by its class.

    >>> name_of(len), name_of(lambda x: x), name_of({})
    ('len', '<lambda>', 'dict')
    """
    if isinstance(value, partial):
        return f"partial({name_of(value.func)})"
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    return str(name).replace("<locals>.", "")


def one_line(value: Any) -> str:
    """A dataclass in a line: its fields, but for empty ones and those that are what they are by default.

    It can stand as `__repr__` in a class. Reading a tensor of one number waits for the device.
    """
    shown = {
        field.name: held
        for field in fields(value)
        if field.repr and not _goes_without_saying(held := getattr(value, field.name), field.default)
    }
    return called(type(value).__name__, **shown)


def short(value: Any) -> str:
    """One value, in a few characters: numbers with six digits, tensors by their shape.

    >>> short(0.123456789), short((1, 2)), short({"a": 1.0}), short("x" * 100)[-4:]
    ('0.123457', '(1, 2)', "{'a': 1}", 'x...')
    """
    if isinstance(value, float):
        return f"{value:.6g}"
    if hasattr(value, "shape") and hasattr(value, "numel"):
        return f"{value.item():.6g}" if value.numel() == 1 else f"{type(value).__name__}{tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + _few([f"{key!r}: {short(held)}" for key, held in value.items()]) + "}"
    if isinstance(value, tuple | list):
        inside = _few([short(held) for held in value])
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    own: Any = type(value).__repr__
    if own is object.__repr__ or callable(value):
        return name_of(value)
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _few(written: list[str]) -> str:
    return ", ".join([*written[:MOST], *([f"... {len(written) - MOST} more"] if len(written) > MOST else [])])


def _goes_without_saying(held: Any, default: Any) -> bool:
    is_default = default is not MISSING and isinstance(held, type(default)) and bool(held == default)
    return is_default or (isinstance(held, Mapping | tuple) and not held)
