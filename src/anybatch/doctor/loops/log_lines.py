"""The log of one watched process: a line for what came since the last update, a JSON list of events. No torch here."""

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SUFFIX = ".doctor.jsonl"
LARGEST_LINE = 4_000_000
"""Characters of a line that is still read: a log is a file that anyone may have written."""

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Log:
    """What one process told, in order."""

    name: str
    lines: tuple[Line, ...] = field(repr=False)

    @property
    def rank(self) -> int:
        """Its rank; 0 where it was alone."""
        told = [int(line["rank"]) for line in self.lines if line.get("event") in ("start", "intent") and "rank" in line]
        return told[-1] if told else 0

    @property
    def has_passes(self) -> bool:
        """False of launchers, workers of loaders and scripts that never trained."""
        return any(line.get("event") in ("backward", "step") for line in self.lines)


def read_logs(folder: Path) -> list[Log]:
    """Every log in a folder, or the one log that `folder` is, by rank; torn last lines are left out."""
    files = [folder] if folder.is_file() else sorted(folder.glob(f"*{SUFFIX}"))
    logs = [Log(file.name, tuple(_lines(file.read_text(errors="replace").splitlines()))) for file in files]
    return sorted(logs, key=lambda log: (log.rank, log.name))


def _lines(texts: Iterable[str]) -> Iterator[Line]:
    """A place in the code is written once, on a line of its own, and named by its number from then on."""
    places: dict[int, Line] = {}
    for text in texts:
        if len(text) > LARGEST_LINE:
            continue
        for line in _events(text):
            if line["event"] == "place":
                places[len(places)] = line
                continue
            if isinstance(line.get("place"), int):
                line["place"] = places.get(line["place"], {})
            yield line


def _events(text: str) -> list[Line]:
    """Of one line; none where it is torn, or not ours."""
    try:
        read = json.loads(text)
    except ValueError:
        return []
    events = read if isinstance(read, list) else [read]
    return [event for event in events if isinstance(event, dict) and isinstance(event.get("event"), str)]


def as_hex(values: list[float]) -> str:
    """Numbers to the last bit, in a form that costs little to write.

    >>> as_hex([0.5])
    '000000000000e03f'
    """
    return struct.pack(f"<{len(values)}d", *values).hex()


def from_hex(text: str) -> tuple[float, ...]:
    """What `as_hex` wrote.

    >>> from_hex(as_hex([0.1, -3.0]))
    (0.1, -3.0)
    """
    raw = bytes.fromhex(text)
    return struct.unpack(f"<{len(raw) // 8}d", raw)


def packed(numbers: Iterable[int]) -> str:
    """A set of numbers as ranges.

    >>> packed([3, 0, 1, 2, 7])
    '0-3,7'
    """
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def unpacked(text: str) -> frozenset[int]:
    """The set of numbers that `packed` wrote.

    >>> sorted(unpacked("0-3,7"))
    [0, 1, 2, 3, 7]
    """
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)
