"""Sizes of memory, as people write them and read them; seconds as they read them. Knows nothing of torch."""

import re

from anybatch.errors import SettingsError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|[KMGT]i?B)", re.IGNORECASE)


def parse_bytes(size: str | int) -> int:
    """Bytes of a size with its unit; a whole number is bytes already.

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
    """Bytes in the unit that reads best.

    >>> show_bytes(900), show_bytes(5_033_165)
    ('900 B', '4.8 MiB')
    """
    size = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def show_seconds(seconds: float) -> str:
    """Seconds in the unit that reads best.

    >>> show_seconds(0.0421), show_seconds(1e-05), show_seconds(0)
    ('42.1 ms', '10.0 us', '0')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds > 0 else "0"
