"""Where in the user's code something happened."""

import os
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

_OURS = str(Path(__file__).parents[2]) + os.sep
_STDLIB = tuple(
    path + os.sep for path in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__)}
)


@dataclass(frozen=True, slots=True)
class Place:
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


def here() -> Place:
    """The innermost line of the user's."""
    via, inner, chain = "", None, []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if is_users(name):
            inner = inner or frame
            chain.append((name, frame.f_lineno))
        elif inner is None and not name.startswith(_OURS):
            via = frame.f_code.co_name
        frame = frame.f_back
    if inner is None:
        return Place("", 0, "", via, "")
    mark = f"{zlib.crc32(repr(chain).encode()):08x}"
    return Place(os.path.abspath(inner.f_code.co_filename), inner.f_lineno, inner.f_code.co_name, via, mark)
