"""The log of one watched process: a JSON object a line, written by the recorder, read by all after it. No torch here."""

import json
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
        return next((int(line.get("rank", 0)) for line in self.lines if line.get("event") == "start"), 0)

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
    for text in texts:
        if len(text) > LARGEST_LINE:
            continue
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("event"), str):
            yield line


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
