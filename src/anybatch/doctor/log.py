"""Log files of watched processes: written by the recorder as JSON lines, read here without torch."""

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anybatch.doctor.finding import Spot

SUFFIX = ".doctor.jsonl"
LARGEST_LINE = 4_000_000  # characters; a log is a file that anyone may have written
CRITERIA = (
    *("NllLoss", "MseLoss", "BinaryCrossEntropy", "SmoothL1Loss", "HuberLoss", "SoftMarginLoss"),
    *("MultiMarginLoss", "MultilabelMarginLoss", "CtcLoss", "KlDiv"),
)
"""Prefixes of the autograd nodes of torch's losses that reduce over their terms themselves."""
Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Log:
    """Events of one process, in order."""

    name: str
    events: tuple[Event, ...] = field(repr=False)

    @property
    def rank(self) -> int:
        """Rank of the process; 0 if it ran alone."""
        ranks = [int(one["rank"]) for one in self.events if one.get("event") in ("start", "intent") and "rank" in one]
        return ranks[-1] if ranks else 0

    @property
    def has_passes(self) -> bool:
        """False for launchers, workers of loaders and scripts that never trained."""
        return any(one.get("event") in ("backward", "step") for one in self.events)


def read_logs(path: Path) -> list[Log]:
    """Read a log, or all logs of a folder sorted by rank; skip lines that are torn or not ours."""
    files = [path] if path.is_file() else sorted(path.glob(f"*{SUFFIX}"))
    logs = [Log(file.name, tuple(_events(file.read_text(errors="replace").splitlines()))) for file in files]
    return sorted(logs, key=lambda log: (log.rank, log.name))


def _events(lines: Iterable[str]) -> Iterator[Event]:
    """Yield events with their places: a place is an event of its own, and later events name it by its number."""
    places: list[Event] = []
    for line in lines:
        try:
            read = json.loads(line) if len(line) <= LARGEST_LINE else []
        except ValueError:
            continue
        for event in read if isinstance(read, list) else [read]:
            if not isinstance(event, dict) or not isinstance(event.get("event"), str):
                continue
            if event["event"] == "place":
                places.append(event)
                continue
            number = event.get("place")
            if isinstance(number, int):
                event["place"] = places[number] if 0 <= number < len(places) else {}
            yield event


def spot_of(place: Any) -> Spot:
    """Return a place of the log as a Spot; an empty one if it is no place."""
    if not isinstance(place, Mapping):
        return Spot()
    line = place.get("line", 0)
    text = {name: str(place.get(name, "")) for name in ("file", "function", "via", "chain")}
    return Spot(line=line if isinstance(line, int) else 0, **text)


def as_hex(values: list[float]) -> str:
    """Write numbers to the last bit, faster than as decimals."""
    return array("d", values).tobytes().hex()


def from_hex(text: str) -> tuple[float, ...]:
    """Read the numbers that `as_hex` wrote.

    >>> as_hex([0.5]), from_hex(as_hex([0.1, -3.0]))
    ('000000000000e03f', (0.1, -3.0))
    """
    return tuple(array("d", bytes.fromhex(text)))


def packed(numbers: Iterable[int]) -> str:
    """Write a set of numbers as ranges.

    >>> packed([3, 0, 1, 2, 7]), sorted(unpacked("0-3,7"))
    ('0-3,7', [0, 1, 2, 3, 7])
    """
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def unpacked(text: str) -> frozenset[int]:
    """Read the set of numbers that `packed` wrote."""
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)
