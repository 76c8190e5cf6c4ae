"""Typed looks into loaded JSON: what is missing or of the wrong kind reads as None or empty, never as an exception."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from anybatch.report.results import Scalar, Values


def loads(text: str) -> Any:
    """The value of JSON text, with NaN and Infinity (which are no JSON, but Python writes them) as None."""
    return json.loads(text, parse_constant=lambda _: None)


def real(value: object) -> float | None:
    """A finite number; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def whole(value: object) -> int | None:
    """A finite number, cut to an integer."""
    number = real(value)
    return None if number is None else int(number)


def text(value: object, missing: str = "") -> str:
    """The value as text; `missing` for None."""
    return missing if value is None else str(value)


def scalar(value: object) -> Scalar:
    """A JSON scalar as it is; a container as compact JSON, so that a settings table can show it."""
    if isinstance(value, float):
        return real(value)
    if value is None or isinstance(value, str | int | bool):
        return value
    return json.dumps(value, ensure_ascii=False)


def scalars(value: object) -> dict[str, Scalar]:
    """A flat table of scalars."""
    return {str(key): scalar(entry) for key, entry in value.items()} if isinstance(value, Mapping) else {}


def reals(value: object) -> dict[str, float | None]:
    """A flat table of numbers."""
    return {str(key): real(entry) for key, entry in value.items()} if isinstance(value, Mapping) else {}


def objects(value: object) -> Iterator[Mapping[str, Any]]:
    """The JSON objects of a list; anything else in it is passed over."""
    if isinstance(value, list):
        yield from (entry for entry in value if isinstance(entry, Mapping))


def nested(value: object) -> Values:
    """Lists of lists as tuples of tuples; a single value as a tuple of one."""
    if value is None:
        return ()
    if not isinstance(value, list):
        return (scalar(value),)
    return tuple(nested(entry) if isinstance(entry, list) else scalar(entry) for entry in value)


def shapes(value: object) -> str:
    """A shape, or several, as people write them: with times signs, several with commas."""
    if not isinstance(value, list):
        return text(value)
    if any(isinstance(entry, list) for entry in value):
        return ", ".join(shapes(entry) for entry in value)
    return " \N{MULTIPLICATION SIGN} ".join(str(entry) for entry in value) if value else "one number"
