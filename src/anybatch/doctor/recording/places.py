"""Where in the user's code something happened."""

import linecache
import os
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

_OURS = str(Path(__file__).parents[2]) + os.sep
_STDLIB = os.path.dirname(os.__file__) + os.sep


@dataclass(frozen=True, slots=True)
class CodePlace:
    """A line of the user's, the chain of calls that led to it, and the library function in between."""

    file: str
    line: int
    function: str
    via: str
    chain: str

    def as_json(self) -> dict[str, object]:
        """For the log."""
        return {"file": self.file, "line": self.line, "function": self.function, "via": self.via, "chain": self.chain}


@cache
def is_users(filename: str) -> bool:
    """False of torch, of every installed package, of Python itself and of anybatch."""
    if filename.startswith("<"):
        return False
    if "site-packages" in filename or "dist-packages" in filename or filename.startswith(_OURS):
        return False
    return not filename.startswith(_STDLIB)


def user_frames(most: int = 200) -> Iterator[FrameType]:
    """The frames of the user's own code, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and most:
        if is_users(frame.f_code.co_filename):
            yield frame
        frame, most = frame.f_back, most - 1


_CLEARS = re.compile(r"\.grad\s*=\s*None|\.grad\.(zero_|detach_)\(|\.grad\.data\.zero_\(|\.grad\.fill_\(")


def cleared_above(place: CodePlace, most: int = 40) -> CodePlace:
    """The line above that clears gradients by hand, which is seen only when backward comes; `place` where there is none."""
    for line in range(place.line - 1, max(0, place.line - most), -1):
        if _CLEARS.search(linecache.getline(place.file, line)):
            return replace(place, line=line)
    return place


def here() -> CodePlace:
    """The innermost line of the user's, worked out once for a chain of calls: a loop comes by again and again."""
    via: CodeType | None = None
    codes: list[CodeType] = []
    lines: list[int] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        whose = _whose(code.co_filename)
        if whose == "user":
            codes.append(code)
            lines.append(frame.f_lineno)
        elif whose == "library" and not codes:
            via = code
        frame = frame.f_back
    key = (id(via), *map(id, codes), *lines)
    known = _KNOWN.get(key)
    if known is None:
        known = _KNOWN[key] = (_place(via, codes, lines), (via, codes))
    return known[0]


_KNOWN: dict[tuple[int, ...], tuple[CodePlace, object]] = {}
"""By the identity of the code that led there, which is kept alive: to hash code takes longer than all else."""


@cache
def _whose(filename: str) -> str:
    return "user" if is_users(filename) else "ours" if filename.startswith(_OURS) else "library"


def _place(via: CodeType | None, codes: list[CodeType], lines: list[int]) -> CodePlace:
    through = "" if via is None else via.co_name
    if not codes:
        return CodePlace("", 0, "", through, "")
    files = [code.co_filename for code in codes]
    mark = f"{zlib.crc32(repr(list(zip(files, lines, strict=True))).encode()):08x}"
    return CodePlace(os.path.abspath(files[0]), lines[0], codes[0].co_name, through, mark)
