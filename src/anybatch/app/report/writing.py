"""Numbers, names, times and shapes as the pages show them."""

import math
import re
from datetime import datetime

from anybatch.app.records.schema import Scalar, Shapes, Values

SHARES = re.compile(r"accuracy|precision|recall|\bf1\b|top[-_ ]?\d", re.IGNORECASE)
"""Metrics with these words in their name are fractions, shown as percentages."""
NOTHING = "\N{EN DASH}"
"""Placeholder for a missing number."""
SPELLED_OUT = {"lr": "learning rate", "train": "training", "valid": "validation"}
SPELLED_OUT |= {"seconds": "time", "peak_bytes": "peak memory"}
"""Keys and parts of keys that are spelled out."""
LONGEST = 8
"""Values of one dimension that are shown."""


def number(value: float | None) -> str:
    """Write four significant digits with grouped thousands; use powers of ten only for very small numbers.

    >>> number(0.45678), number(12345678), number(0.1), number(2.5e-07), number(3.0)
    ('0.4568', '12,345,678', '0.1', '2.5e-7', '3')
    """
    if value is None:
        return NOTHING
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    mantissa, _, exponent = f"{value:.4g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def percent(value: float | None) -> str:
    """Write a fraction as a percentage.

    >>> percent(0.849)
    '84.9 %'
    """
    return NOTHING if value is None else f"{100 * value:.1f} %"


def size(num_bytes: float | None) -> str:
    """Write bytes in the largest binary unit that leaves a number of at least 1.

    >>> size(1536), size(3 * 2**30)
    ('1.5 KiB', '3 GiB')
    """
    if num_bytes is None:
        return NOTHING
    divisor, unit = size_unit(num_bytes)
    return f"{number(float(f'{num_bytes / divisor:.3g}'))} {unit}"


def written_task(task: str) -> str:
    """Return the name of a built-in task, or the file name of a task file.

    >>> written_task("digits"), written_task("/home/me/tasks/mine.py")
    ('digits', 'mine.py')
    """
    return task.replace("\\", "/").rpartition("/")[2] if task.endswith(".py") else task


def size_unit(largest: float) -> tuple[float, str]:
    """Return (divisor, name) of the unit for sizes up to `largest` bytes."""
    power = 0 if largest < 1 else min(4, int(math.log2(largest) // 10))
    return float(2 ** (10 * power)), ("bytes", "KiB", "MiB", "GiB", "TiB")[power]


def duration(seconds: float | None) -> str:
    """Write a time span.

    >>> duration(0.00042), duration(3.21), duration(75), duration(7384)
    ('420 µs', '3.21 s', '1 min 15 s', '2 h 3 min')
    """
    if seconds is None:
        return NOTHING
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    divisor, unit = duration_unit(seconds)
    return f"{float(f'{seconds / divisor:.3g}'):g} {unit}"


def duration_unit(longest: float) -> tuple[float, str]:
    """Return (divisor, name) of the unit for times up to `longest` seconds."""
    return (1.0, "s") if longest >= 1 else (1e-3, "ms") if longest >= 1e-3 else (1e-6, "µs")


def without_breaks(text: str) -> str:
    """Replace the spaces between numbers and their units by no-break spaces.

    >>> without_breaks("97.9 ± 0.4 % after 10 ms") == "97.9\\xa0±\\xa00.4\\xa0% after 10\\xa0ms"
    True
    """
    units = re.sub(r"(?<=\d) (?=%|[µm]?s\b|min\b|[KMGT]iB\b)", "\N{NO-BREAK SPACE}", text)
    return units.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


def is_share(name: str, values: list[float | None]) -> bool:
    """Return whether a metric is a fraction, judged by its name and its values."""
    return SHARES.search(name) is not None and all(value is None or 0 <= value <= 1 for value in values)


def words(name: str) -> str:
    """Spell out a key.

    >>> words("micro_batches_per_update"), words("valid_loss"), words("lr_peak"), words("lr_rule")
    ('micro-batches per update', 'validation loss', 'learning rate, peak', 'learning rate rule')
    """
    if name in SPELLED_OUT:
        return SPELLED_OUT[name]
    spaced = re.sub(r"\bmicro batch", "micro-batch", name.replace("_", " "))
    spaced = re.sub(r"\b(lr|train|valid)\b", lambda match: SPELLED_OUT[match[0]], spaced)
    return re.sub(r"^learning rate (?=first|peak|last)", "learning rate, ", spaced)


def capitalized(text: str) -> str:
    """Make the first letter a capital, and leave the others as they are."""
    return text[:1].upper() + text[1:]


def written_value(key: str, value: Scalar) -> str:
    """Write one value of a settings table; its key tells bytes, seconds and fractions from plain numbers."""
    if value is None or value == "":
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if key.endswith("bytes"):
        return size(value)
    if key.endswith("seconds"):
        return duration(value)
    if is_share(key, [value]):
        return percent(value)
    return str(value) if key == "seed" else number(value)


def written_sample(values: Values) -> str:
    """Write sample values of a tensor, one row per line; long rows are cut.

    >>> written_sample((0.123456, -2.0)), written_sample(((1, 20), (-3, 4)))
    ('0.1235  -2', ' 1  20\\n-3   4')
    """
    if not any(isinstance(value, tuple) for value in values):
        return "  ".join(_cells(values))
    rows = [_cells(value) if isinstance(value, tuple) else [_value(value)] for value in values[:LONGEST]]
    widths = [max(len(row[place]) for row in rows if place < len(row)) for place in range(max(map(len, rows)))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False)) for row in rows]
    return "\n".join([*lines, "…"] if len(values) > LONGEST else lines)


def written_shapes(shapes: Shapes) -> str:
    """Write shapes with times signs, several with commas.

    >>> written_shapes(((16, 10), (16,))) == "16 \N{MULTIPLICATION SIGN} 10, 16", written_shapes(((),))
    (True, 'one number')
    """
    return ", ".join(" \N{MULTIPLICATION SIGN} ".join(map(str, shape)) or "one number" for shape in shapes)


def written_time(iso: str) -> str:
    """Write an ISO time stamp as a date; return any other text unchanged.

    >>> written_time("2026-03-01T12:05:09+00:00"), written_time("yesterday")
    ('1 March 2026, 12:05 UTC', 'yesterday')
    """
    try:
        time = datetime.fromisoformat(iso)
    except ValueError:
        return iso
    return f"{time.day} {time:%B %Y, %H:%M} {time.tzname() or ''}".strip()


def _cells(values: Values) -> list[str]:
    shown = [written_sample(value) if isinstance(value, tuple) else _value(value) for value in values[:LONGEST]]
    return [*shown, "…"] if len(values) > LONGEST else shown


def _value(value: object) -> str:
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
