"""Format values as text and HTML: objects in one line, counts, sizes, times and tables."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import partial
from html import escape
from typing import Any

from anybatch.errors import SettingsError

LONGEST, MOST = 60, 6  # characters of a value, members of a container


def called(name: str, *parts: str, **options: Any) -> str:
    """Write `Name(part, part, option=value)`.

    >>> called("Update", "Linear", "SGD", clip_norm=1.0)
    'Update(Linear, SGD, clip_norm=1)'
    """
    return f"{name}({', '.join([*parts, *(f'{key}={short(value)}' for key, value in options.items())])})"


def name_of(value: Any) -> str:
    """Return the name of a function, or the class name of any other object.

    >>> name_of(len), name_of(lambda x: x), name_of({})
    ('len', '<lambda>', 'dict')
    """
    if isinstance(value, partial):
        return f"partial({name_of(value.func)})"
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    return str(name).replace("<locals>.", "")


def one_line(value: Any) -> str:
    """Write a dataclass in one line, without fields that are empty or have their default. Usable as `__repr__`.

    Reading a tensor of one number waits for its device.
    """
    held = {field: getattr(value, field.name) for field in fields(value) if field.repr}
    shown = {field.name: one for field, one in held.items() if not _is_obvious(one, field.default)}
    return called(type(value).__name__, **shown)


def _is_obvious(held: Any, default: Any) -> bool:
    is_default = default is not MISSING and isinstance(held, type(default)) and bool(held == default)
    return is_default or (isinstance(held, Mapping | tuple) and not held)


def short(value: Any) -> str:
    """Write a value in a few characters: floats with six digits, tensors by their shape.

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


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return the end of a sentence that suggests the nearest name in `known`; empty if none is near.

    >>> did_you_mean("Updtae", ["Update", "Window"]), did_you_mean("banana", ["Update"])
    ('; did you mean Update?', '')
    """
    from difflib import get_close_matches  # loaded on an error only, not by `import anybatch`

    names = {name.lower(): name for name in known}
    near = get_close_matches(str(word).lower(), names, n=1)
    return f"; did you mean {names[near[0]]}?" if near else ""


def one_of(value: object, choices: Iterable[str], *, or_none: bool = False) -> str:
    """List the valid choices for a message about `value`, and suggest the nearest.

    >>> one_of("drpo", ("raise", "drop")), one_of(3, ("host", "disk"), or_none=True)
    ('expected one of raise, drop; did you mean drop?', 'expected one of host, disk, or None.')
    """
    known = list(choices)
    text = f"expected one of {', '.join(known)}{', or None' if or_none else ''}"
    return text + (did_you_mean(value, known) or ".")


def plural(count: int | float, noun: str) -> str:
    """Write a count with its noun.

    >>> plural(1, "epoch"), plural(1500, "epoch"), plural(2, "micro-batch")
    ('1 epoch', '1,500 epochs', '2 micro-batches')
    """
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') and noun != 'epoch' else 's'}"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first column aligned left, the others right.

    >>> table(["arm", "updates"], [["small", "630"], ["exact batch", "160"]])
    ['arm          updates', '-----------  -------', 'small            630', 'exact batch      160']
    """
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]

    def line(first: str, *others: str) -> str:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        return "  ".join([first.ljust(widths[0]), *cells]).rstrip()

    return [line(*headers), "  ".join("-" * width for width in widths), *(line(*row) for row in rows)]


_CELL = "text-align:left;padding:2px 12px 2px 0"


def html_block(title: str, *parts: str) -> str:
    """Join a title and parts that are HTML already."""
    return f"<div><strong>{escape(title)}</strong>{''.join(parts)}</div>"


def sentences(texts: Iterable[str]) -> str:
    """Write each text as a paragraph."""
    return "".join(f"<p>{escape(text)}</p>" for text in texts)


def html_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Write a table with a header row; values that are not strings are written by `short`.

    >>> html_table(["a<b"], [["<script>"]])[-40:]
    '&lt;script&gt;</td></tr></tbody></table>'
    """
    head = "".join(f'<th scope="col" style="{_CELL}">{escape(column)}</th>' for column in columns)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{escape(_written(cell))}</td>' for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def facts_table(facts: Mapping[str, Any]) -> str:
    """Write a table with one row per name and value."""
    body = "".join(
        f'<tr><th scope="row" style="{_CELL}">{escape(name)}</th><td style="{_CELL}">{escape(_written(value))}</td></tr>'
        for name, value in facts.items()
    )
    return f"<table><tbody>{body}</tbody></table>"


def _written(value: Any) -> str:
    return value if isinstance(value, str) else short(value)


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|[KMGT]i?B)", re.IGNORECASE)


def parse_bytes(size: str | int) -> int:
    """Convert a size such as "6GiB" to bytes; an int is bytes already.

    >>> parse_bytes("1.5GiB"), parse_bytes("800MB"), parse_bytes(4096)
    (1610612736, 800000000, 4096)
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if found is not None:
        number, unit = float(found[1]), found[2].upper()
        base = 1024 if "I" in unit else 1000
        limit = number * base ** " KMGT".index(unit[0].replace("B", " "))
        if 1 <= limit < float("inf"):
            return int(limit)
    raise SettingsError(f"{size!r} is no memory size: expected a number above 0 with its unit, such as 6GiB or 800MB.")


def show_bytes(number: float) -> str:
    """Write bytes with a suitable unit.

    >>> show_bytes(900), show_bytes(5_033_165)
    ('900 B', '4.8 MiB')
    """
    size = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
