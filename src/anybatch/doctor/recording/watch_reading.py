"""Numbers that the user's code reads off a loss: what is logged is what was given to backward, divided or not."""

import linecache
import re
import weakref
from typing import Any

from torch import Tensor

from anybatch.doctor.recording.patches import Patches
from anybatch.doctor.recording.places import CodePlace, here
from anybatch.doctor.recording.tape import Tape

READS = ("item", "__float__")
MOST_READS = 8
"""Numbers read since the last backward pass that may turn out to be its loss."""
MOST_USES = 12
_GROWS = re.compile(r"^\s*([\w.]+)(?:\[[^]]*\])?\s*\+?=[^=]")


class ReadingWatch:
    """Replaces `Tensor.item` and `float()`; a loss is known by where it lies and by its value."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self._reads: dict[int, tuple[float, CodePlace]] = {}
        self._last: tuple[int, float, weakref.ref[Tensor]] | None = None
        self._told: set[CodePlace] = set()

    def install(self, patches: Patches) -> None:
        """From now on reads are seen."""
        note = self.tape.safely(self._note)

        def make(original: Any) -> Any:
            def read(tensor: Any, *arguments: Any) -> Any:
                value = original(tensor, *arguments)
                if type(value) is float and not self.tape.depth:
                    note(tensor, value)
                return value

            return read

        for name in READS:
            patches.replace(Tensor, name, make)

    def _note(self, tensor: Tensor, value: float) -> None:
        where, last = tensor.data_ptr(), self._last
        if last is not None and last[:2] == (where, value) and last[2]() is not None:
            self._tell(here())
        elif len(self._reads) < MOST_READS:
            self._reads[where] = (value, here())

    def backward_of(self, loss: Tensor, value: float) -> None:
        """This loss was given to backward: reads before and after it are of what backward was given."""
        where = loss.data_ptr()
        before = self._reads.get(where)
        self._reads = {}
        self._last = (where, value, weakref.ref(loss))
        if before is not None and before[0] == value:
            self._tell(before[1])

    def _tell(self, place: CodePlace) -> None:
        if place in self._told or place.via not in ("", "__format__"):
            return  # a library reads for itself
        self._told.add(place)
        text = linecache.getline(place.file, place.line).strip()
        name = _GROWS.match(text)
        uses = [] if name is None else _uses(name[1], place)
        self.tape.write("read", place, text=text, variable="" if name is None else name[1], uses=uses)


def _uses(name: str, place: CodePlace) -> list[str]:
    """Other lines of the file with that variable."""
    lines = enumerate(linecache.getlines(place.file), start=1)
    word = re.compile(rf"(?<![\w.]){re.escape(name)}\b")
    return [line.strip() for number, line in lines if number != place.line and word.search(line)][:MOST_USES]
