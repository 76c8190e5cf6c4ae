"""State of the recorder: parameters and their gradients, the log file, lines of the user's code, patched functions."""

import json
import linecache
import os
import re
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import cache, wraps
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import unserializable_hook

from anybatch.core import version_of
from anybatch.doctor.finding import Spot
from anybatch.doctor.log import SUFFIX, as_hex, packed
from anybatch.doctor.recording.installing import Watch

FLUSHED = ("start", "step", "trouble")
"""Events after which the file is flushed, so that a killed script leaves a log up to its last update."""
MOST_UNWRITTEN = 200
PROBED, ELEMENTS = 2, 16
"""Probed parameters per optimizer, and elements of each gradient that are logged."""
Signature = tuple[int, int] | None
_encode = json.JSONEncoder(check_circular=False, separators=(",", ":")).encode


class EventLog:
    """Events of one process, and the state they are derived from. No method writes to a tensor."""

    def __init__(self, watch: Watch) -> None:
        Path(watch.folder).mkdir(parents=True, exist_ok=True)
        self.watch = watch
        self.patches = ExitStack()  # restores torch when closed
        name = f"{os.environ.get('RANK', '0')}-{os.getpid()}-{time.time_ns() % 10**9}{SUFFIX}"
        self._file = (Path(watch.folder) / name).open("w")
        self._began = time.perf_counter()
        self._unwritten: list[dict[str, Any]] = []
        self._places: dict[Spot, int] = {}
        self.parameters: list[weakref.ref[Tensor]] = []
        self._numbers: dict[int, int] = {}  # of parameters, by id
        self._signatures: list[Signature] = []
        self._optimizers: dict[int, tuple[weakref.ref[Optimizer], int]] = {}
        self.owned: dict[int, list[int]] = {}  # numbers of an optimizer's parameters
        self._owned_ids: dict[int, list[int]] = {}
        self._probes: dict[int, tuple[int, int]] = {}  # by parameter: logged elements of its gradient, and their stride
        self.arrived: dict[int, list[float]] = {}  # probed elements that the running backward pass has produced
        self.current: dict[str, Any] = {}  # facts for the next backward event
        self.num_passes = self.num_updates = self.depth = 0
        self.steps: dict[int, int] = {}  # by optimizer
        self.is_ended = self.is_broken = self.is_inside_scaler = False
        self.reason = "finished"
        self.write("start", rank=int(os.environ.get("RANK", 0)), world=int(os.environ.get("WORLD_SIZE", 1)))

    def write(self, event: str, place: Spot | None = None, **facts: Any) -> None:
        """Add an event; the events of one update become one line of the file."""
        if self.is_ended or self._file.closed:
            return
        if place is not None:
            if place not in self._places:
                self._places[place] = len(self._places)
                self._unwritten.append({"event": "place", **asdict(place)})
            facts["place"] = self._places[place]
        facts["event"], facts["t"] = event, round(time.perf_counter() - self._began, 6)
        self._unwritten.append(facts)
        if event in FLUSHED or len(self._unwritten) >= MOST_UNWRITTEN:
            self._flush()

    def _flush(self) -> None:
        self._file.write(_encode(self._unwritten) + "\n")
        self._file.flush()
        self._unwritten = []

    def close(self, reason: str) -> None:
        self.log_changes()
        self.write("end", reason=reason, place=here())
        self._flush()
        self.is_ended = True
        self._file.close()

    def patch(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace `owner.name` by `make(owner.name)` until `patches` is closed."""
        original, inherited = getattr(owner, name), object()
        own = vars(owner).get(name, inherited)
        replacement = make(original)
        with suppress(AttributeError):
            replacement = wraps(original)(replacement)
        replacement.is_doctors = True
        restore = (delattr, owner, name) if own is inherited else (setattr, owner, name, own)
        self.patches.callback(*restore)
        setattr(owner, name, replacement)

    def around(
        self, owner: Any, name: str, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
    ) -> None:
        """Call `before(*arguments)` and `after(result, *arguments)`, both safely, around `owner.name`."""
        begin = None if before is None else self.safely(before)
        end = None if after is None else self.safely(after)

        def make(original: Any) -> Any:
            def replaced(*arguments: Any, **named: Any) -> Any:
                if begin is not None:
                    begin(*arguments, **named)
                result = original(*arguments, **named)
                if end is not None:
                    end(result, *arguments, **named)
                return result

            return replaced

        self.patch(owner, name, make)

    def safely(self, action: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `action` so that it never raises into the user's script, and does not run after a failure or the end."""

        @wraps(action)
        def guarded(*arguments: Any, **named: Any) -> Any:
            if self.is_broken or self.is_ended:
                return None
            try:
                return action(*arguments, **named)
            except Exception as error:
                self.is_broken = True
                line = [number for _, number in walk_tb(error.__traceback__)][-1]
                self.write("trouble", error=f"{type(error).__name__}: {error}"[:300], within=action.__name__, line=line)
                return None

        return guarded

    def number(self, parameter: Tensor) -> int:
        """Return the number of a parameter, a new one if it is not known."""
        found = self._numbers.get(id(parameter))
        if found is not None and self.parameters[found]() is parameter:
            return found
        self._numbers[id(parameter)] = len(self.parameters)
        self.parameters.append(weakref.ref(parameter))
        self._signatures.append(_signature(parameter))
        return len(self.parameters) - 1

    def optimizer(self, optimizer: Optimizer) -> int:
        """Return the number of an optimizer; log it if it is new or has other parameters than before."""
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        known = self._optimizers.get(id(optimizer))
        if known is None or known[0]() is not optimizer:
            known = (weakref.ref(optimizer), len(self._optimizers))
            self._optimizers[id(optimizer)] = known
        number, ids = known[1], list(map(id, own))
        if ids != self._owned_ids.get(number):
            self._owned_ids[number] = ids
            self.owned[number] = numbers = [self.number(parameter) for parameter in own]
            self._probe(own)
            kind = type(optimizer).__name__
            self.write("optimizer", optimizer=number, kind=kind, parameters=packed(numbers), place=here())
        return number

    def _probe(self, parameters: list[Tensor]) -> None:
        wanted = [p for p in parameters if isinstance(p, Tensor) and p.requires_grad and type(p.data) is Tensor]
        step = max(1, len(wanted) // PROBED)
        for parameter in wanted[::step][:PROBED]:
            number = self.number(parameter)
            if number not in self._probes and parameter.numel():
                self._probes[number] = (min(ELEMENTS, parameter.numel()), max(1, parameter.numel() // ELEMENTS))
                parameter.register_hook(self._arrival_hook(number))

    def _arrival_hook(self, number: int) -> Callable[[Tensor], None]:
        """Return a hook that notes what backward adds to a probed parameter's gradient."""
        reference = weakref.ref(self)

        def arrive(gradient: Tensor) -> None:
            log = reference()
            if log is None or log.is_ended or log.is_broken or gradient.is_sparse or type(gradient) is not Tensor:
                return
            taken = _probed(gradient, log._probes[number])
            before = log.arrived.get(number)
            log.arrived[number] = taken if before is None else [a + b for a, b in zip(before, taken, strict=True)]

        return unserializable_hook(arrive)  # type: ignore[no-any-return]

    def take_arrived(self) -> dict[str, str]:
        """Return the probed elements that the last backward pass produced."""
        arrived, self.arrived = self.arrived, {}
        return {str(number): as_hex(values) for number, values in arrived.items()}

    def probe_values(self, numbers: Iterable[int]) -> dict[str, str]:
        """Return the probed elements of `.grad` as it is now."""
        values = {}
        for number in numbers:
            parameter = self.parameters[number]() if number in self._probes else None
            if parameter is not None and parameter.grad is not None and not parameter.grad.is_sparse:
                values[str(number)] = as_hex(_probed(parameter.grad, self._probes[number]))
        return values

    def log_changes(self, *, is_zeroed: bool = False, place: Spot | None = None) -> None:
        """Compare every gradient with its last signature, and log which were cleared, assigned or modified."""
        before = self._signatures
        changed = self.accept_changes()
        if not changed:
            return
        how: dict[str, list[int]] = {"cleared": [], "assigned": [], "modified": []}
        for number in changed:
            old, new = before[number], self._signatures[number]
            if new is None or is_zeroed or self._is_zero(number):
                how["cleared"].append(number)
            else:
                how["assigned" if old is None or old[0] != new[0] else "modified"].append(number)
        spot = place or here()
        if how["cleared"] and not is_zeroed:
            spot = _clearing_line(spot)
        for name, numbers in how.items():
            if numbers:
                self.write("changed", how=name, parameters=packed(numbers), place=spot)

    def accept_changes(self) -> list[int]:
        """Take the signatures of all gradients, and return the parameters that changed.

        A collected parameter keeps its last signature: it was not zeroed.
        """
        before = self._signatures
        now = [
            old if (parameter := reference()) is None else _signature(parameter)
            for reference, old in zip(self.parameters, before, strict=True)
        ]
        self._signatures = now
        return [] if now == before else [number for number, one in enumerate(now) if one != before[number]]

    def _is_zero(self, number: int) -> bool:
        parameter = self.parameters[number]()
        gradient = None if parameter is None else parameter.grad
        return gradient is not None and not gradient.is_sparse and not bool(gradient.any())


def _probed(gradient: Tensor, probe: tuple[int, int]) -> list[float]:
    count, stride = probe
    flat = gradient if gradient.is_contiguous() else gradient.contiguous()
    return flat.as_strided((count,), (stride,)).tolist()


def _signature(parameter: Tensor) -> Signature:
    """Return the identity and version of a gradient; they change when it is written to."""
    gradient: Any = parameter.grad
    if gradient is None:
        return None
    if type(gradient) is Tensor or not hasattr(gradient, "to_local"):
        return id(gradient), version_of(gradient)
    return id(gradient), version_of(gradient.to_local())  # a shard is written to, not its wrapper


_OURS = str(Path(__file__).parents[2]) + os.sep
_STDLIB = os.path.dirname(os.__file__) + os.sep


@cache
def _owner(filename: str) -> str:
    """Return "user", "ours" for anybatch, or "library" for installed packages and Python."""
    if filename.startswith(_OURS):
        return "ours"
    is_installed = "site-packages" in filename or "dist-packages" in filename
    return "library" if is_installed or filename.startswith(("<", _STDLIB)) else "user"


def user_frames(most: int = 200) -> Iterator[FrameType]:
    """Yield the frames of the user's code, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and most:
        if _owner(frame.f_code.co_filename) == "user":
            yield frame
        frame, most = frame.f_back, most - 1


def is_called_by(function: str, file: str) -> bool:
    """Return True if one of the 24 innermost frames is this function of a file with this ending."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(24):
        if frame is None:
            return False
        if frame.f_code.co_name == function and frame.f_code.co_filename.endswith(file):
            return True
        frame = frame.f_back
    return False


_CLEARS = re.compile(r"\.grad\s*=\s*None|\.grad\.(zero_|detach_)\(|\.grad\.data\.zero_\(|\.grad\.fill_\(")


def _clearing_line(place: Spot) -> Spot:
    """Return the line above `place` that clears gradients by hand; `place` if there is none within 40 lines."""
    for line in range(place.line - 1, max(0, place.line - 40), -1):
        if _CLEARS.search(linecache.getline(place.file, line)):
            return replace(place, line=line)
    return place


def here() -> Spot:
    """Return the innermost line of the user's code; cached by the chain of calls, because loops repeat it."""
    via: CodeType | None = None
    codes: list[CodeType] = []
    lines: list[int] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        owner = _owner(code.co_filename)
        if owner == "user":
            codes.append(code)
            lines.append(frame.f_lineno)
        elif owner == "library" and not codes:
            via = code
        frame = frame.f_back
    key = (id(via), *map(id, codes), *lines)
    known = _KNOWN.get(key)
    if known is None:
        known = _KNOWN[key] = (_place(via, codes, lines), (via, codes))
    return known[0]


_KNOWN: dict[tuple[int, ...], tuple[Spot, object]] = {}
"""Spots by the ids of the code objects that led there, which are kept alive; hashing code objects is slow."""


def _place(via: CodeType | None, codes: list[CodeType], lines: list[int]) -> Spot:
    through = "" if via is None else via.co_name
    if not codes:
        return Spot("", 0, "", through, "")
    files = [code.co_filename for code in codes]
    mark = f"{zlib.crc32(repr(list(zip(files, lines, strict=True))).encode()):08x}"
    return Spot(os.path.abspath(files[0]), lines[0], codes[0].co_name, through, mark)
