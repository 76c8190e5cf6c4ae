"""Records as JSON text that any reader takes."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anybatch.records.schema import JSON_NAMES


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
