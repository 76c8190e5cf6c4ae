"""Records to JSON and back, of any age: what is missing or of the wrong kind reads as None or empty, never as an exception."""

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
    """The value of JSON text, with NaN and Infinity (which are no JSON, but Python writes them) as None."""
    return json.loads(text, parse_constant=lambda _: None)


def read(record: type[Record], fields: object) -> Record | None:
    """A record from a JSON object; None where a number is missing that the record's type says is always there."""
    if not isinstance(fields, Mapping):
        return None
    schema: Any = record
    values = {}
    for name, key, convert, default in _fields_of(schema):
        value = convert(fields.get(key))
        values[name] = default if value is None else value
    return None if dataclasses.MISSING in values.values() else record(**values)


def plain(value: Any) -> Any:
    """`value` as JSON knows it: dataclasses become dicts, tuples lists, inf and nan None."""
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
    """`value` as JSON text; inf and nan become null, because JSON has no other word for them.

    >>> to_json({"seconds": float("nan"), "stages": ("load", "forward")})
    '{"seconds": null, "stages": ["load", "forward"]}'
    """
    return json.dumps(plain(value), indent=indent, allow_nan=False, ensure_ascii=False)


def real(value: object) -> float | None:
    """A finite number; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # no float can hold this integer
        return None


def whole(value: object) -> int | None:
    """A finite number, cut to an integer."""
    number = real(value)
    return None if number is None else int(number)


def scalar(value: object) -> Scalar:
    """A JSON scalar as it is; a container as compact JSON, so that a settings table can show it."""
    if isinstance(value, float):
        return real(value)
    if value is None or isinstance(value, str | int | bool):
        return value
    return json.dumps(value, ensure_ascii=False)


def nested(value: object) -> Values:
    """Lists of lists as tuples of tuples; a single value as a tuple of one."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        return (scalar(value),)
    return tuple(nested(entry) if isinstance(entry, list | tuple) else scalar(entry) for entry in value)


def shapes(value: object) -> Shapes:
    """Several shapes, or a single one, as a tuple of shapes."""
    if value is None:
        return ()
    if not isinstance(value, list):
        return ((str(value),),)
    if any(isinstance(entry, list) for entry in value):
        return tuple(shape for entry in value for shape in shapes(entry))
    return (tuple(entry if isinstance(entry, int) else str(entry) for entry in value),)


@cache
def _fields_of(record: Any) -> tuple[tuple[str, str, Callable[[object], Any], Any], ...]:
    """For each field its name, its key in JSON, its converter, and its value where it is missing."""
    found = []
    for item in dataclasses.fields(record):
        convert = _CONVERTERS.get(item.type) or partial(_records, get_args(item.type)[0])
        default = _EMPTY.get(item.type) if item.default is dataclasses.MISSING else item.default
        found.append((item.name, JSON_NAMES.get(item.name, item.name), convert, default))
    return tuple(found)


def _records(record: type[Record], value: object) -> tuple[Record, ...]:
    """The records of a list; anything else in it is passed over."""
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
"""The value of a field that has no default and is missing, by its type; None for all other types."""
