"""Convert records to JSON and back. A missing or wrong value reads as None or empty and never raises."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, get_args

from anybatch.app.records.schema import JSON_NAMES, Numbers, Scalar, Scalars, Shapes, Values

Record = TypeVar("Record")


def loads(text: str) -> Any:
    """Parse JSON, with NaN and Infinity as None."""
    return json.loads(text, parse_constant=lambda _: None)


def read(record: type[Record], fields: object) -> Record | None:
    """Make a record from a JSON object; None if it lacks a number that the record needs."""
    if not isinstance(fields, Mapping):
        return None
    schema: Any = record
    values = {}
    for name, key, convert, default in _fields_of(schema):
        value = convert(fields.get(key))
        values[name] = default if value is None else value
    return None if dataclasses.MISSING in values.values() else record(**values)


def plain(value: Any) -> Any:
    """Convert to JSON types: dataclasses become dicts, tuples lists, inf and nan None."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {JSON_NAMES.get(item.name, item.name): plain(getattr(value, item.name)) for item in fields}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def to_json(value: Any, indent: int | None = None) -> str:
    """Convert to JSON text; inf and nan become null.

    >>> to_json({"seconds": float("nan"), "stages": ("load", "forward")})
    '{"seconds": null, "stages": ["load", "forward"]}'
    """
    return json.dumps(plain(value), indent=indent, allow_nan=False, ensure_ascii=False)


def real(value: object) -> float | None:
    """Return a finite number, or None; a bool is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # no float can hold this integer
        return None


def whole(value: object) -> int | None:
    """Return a finite number truncated to an integer, or None."""
    number = real(value)
    return None if number is None else int(number)


def scalar(value: object) -> Scalar:
    """Return a JSON scalar as it is, and a container as JSON text."""
    if isinstance(value, float):
        return real(value)
    if value is None or isinstance(value, str | int | bool):
        return value
    return json.dumps(value, ensure_ascii=False)


def nested(value: object) -> Values:
    """Convert lists of lists to tuples of tuples, and a single value to a tuple of one."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        return (scalar(value),)
    return tuple(nested(entry) if isinstance(entry, list | tuple) else scalar(entry) for entry in value)


def shapes(value: object) -> Shapes:
    """Convert one or several shapes to a tuple of shapes."""
    if value is None:
        return ()
    if not isinstance(value, list):
        return ((str(value),),)
    if any(isinstance(entry, list) for entry in value):
        return tuple(shape for entry in value for shape in shapes(entry))
    return (tuple(entry if isinstance(entry, int) else str(entry) for entry in value),)


@cache
def _fields_of(record: Any) -> tuple[tuple[str, str, Callable[[object], Any], Any], ...]:
    """Return (name, key in JSON, converter, default) of each field."""
    found = []
    for item in dataclasses.fields(record):
        convert = _CONVERTERS.get(item.type) or partial(_records, get_args(item.type)[0])
        default = _EMPTY.get(item.type) if item.default is dataclasses.MISSING else item.default
        found.append((item.name, JSON_NAMES.get(item.name, item.name), convert, default))
    return tuple(found)


def _records(record: type[Record], value: object) -> tuple[Record, ...]:
    return tuple(found for entry in _entries(value) if (found := read(record, entry)) is not None)


def _entries(value: object) -> Iterable[Any]:
    return value if isinstance(value, list | tuple) else ()


def _table(value: object, convert: Callable[[object], Any] = scalar) -> dict[str, Any] | None:
    return {str(key): convert(entry) for key, entry in value.items()} if isinstance(value, Mapping) else None


def _text(value: object) -> str | None:
    return None if value is None else str(value)


_CONVERTERS: dict[Any, Callable[[object], Any]] = {
    bool: lambda value: value if isinstance(value, bool) else None,
    float: real,
    float | None: real,
    int: whole,
    int | None: whole,
    str: _text,
    str | None: _text,
    Numbers: lambda value: _table(value, real) or {},
    Scalar: scalar,
    Scalars: lambda value: _table(value) or {},
    Scalars | None: _table,
    Shapes: shapes,
    Values: nested,
    tuple[str, ...]: lambda value: tuple("" if entry is None else str(entry) for entry in _entries(value)),
}
_EMPTY: dict[Any, Any] = {bool: False, str: "", int: dataclasses.MISSING, float: dataclasses.MISSING}
"""Values of missing fields without a default, by type; None for all other types."""
