"""The state of the recorder: parameters and their gradients, the log, places in the user's code, replaced functions."""

import json
import linecache
import os
import re
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache, wraps
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from anybatch.core import version_of
from anybatch.doctor.finding import Spot
from anybatch.doctor.loops import SUFFIX, as_hex, packed
from anybatch.doctor.recording.watch import Watch

FLUSHED = ("start", "step", "trouble")
"""A script that is killed leaves what was seen until its last update."""
MOST_UNWRITTEN = 200
PROBED, ELEMENTS = 2, 16
"""Parameters of an optimizer, and numbers of each, whose gradients are written down."""
Signature = tuple[int, int] | None
_encode = json.JSONEncoder(check_circular=False, separators=(",", ":")).encode


class EventLog:
    """Events of one process, and the state that they are told from. No method writes to a tensor."""

    def __init__(self, watch: Watch) -> None:
        Path(watch.folder).mkdir(parents=True, exist_ok=True)
        self.watch, self.patches = watch, Patches()
        name = f"{os.environ.get('RANK', '0')}-{os.getpid()}-{time.time_ns() % 10**9}{SUFFIX}"
        self._file = (Path(watch.folder) / name).open("w")
        self._began = time.perf_counter()
        self.parameters: list[weakref.ref[Tensor]] = []
        self._numbers: dict[int, int] = {}
        self.signatures: list[Signature] = []
        self.optimizers: dict[int, tuple[weakref.ref[Optimizer], int]] = {}
        self.probes: dict[int, tuple[int, int]] = {}
        """By the number of a parameter: how many of its gradient's numbers are written down, and how far apart."""
        self.arrived: dict[int, list[float]] = {}
        self._places: dict[Spot, int] = {}
        self._unwritten: list[dict[str, Any]] = []
        self.num_passes = self.num_updates = self.depth = 0
        self.steps: dict[int, int] = {}
        self.owned: dict[int, list[int]] = {}
        """The parameters of an optimizer, by their numbers."""
        self._own_ids: dict[int, list[int]] = {}
        self.is_ended = self.is_broken = self.is_inside_scaler = False
        self.reason = "finished"
        self.current: dict[str, Any] = {}
        self.write("start", rank=int(os.environ.get("RANK", 0)), world=int(os.environ.get("WORLD_SIZE", 1)))

    def write(self, event: str, place: Spot | None = None, **facts: Any) -> None:
        """Note one event; what happened since the last update is one line of the file."""
        if self.is_ended or self._file.closed:
            return
        if place is not None:
            number = self._places.get(place)
            if number is None:
                number = self._places[place] = len(self._places)
                self._unwritten.append({"event": "place", **asdict(place)})
            facts["place"] = number
        facts["event"], facts["t"] = event, round(time.perf_counter() - self._began, 6)
        self._unwritten.append(facts)
        if event in FLUSHED or len(self._unwritten) >= MOST_UNWRITTEN:
            self._flush()

    def _flush(self) -> None:
        self._file.write(_encode(self._unwritten) + "\n")
        self._file.flush()
        self._unwritten = []

    def close(self, reason: str) -> None:
        """The last line."""
        self.look()
        self.write("end", reason=reason, place=here())
        self._flush()
        self.is_ended = True
        self._file.close()

    def around(
        self,
        owner: Any,
        name: str,
        before: Callable[..., Any] | None = None,
        after: Callable[..., Any] | None = None,
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

        self.patches.replace(owner, name, make)

    def safely(self, action: Callable[..., Any]) -> Callable[..., Any]:
        """`action`, which neither raises into the user's script nor runs once the recorder has failed or ended."""

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
        """The number of a parameter, a new one at first sight."""
        found = self._numbers.get(id(parameter))
        if found is not None and self.parameters[found]() is parameter:
            return found
        place = len(self.parameters)
        self._numbers[id(parameter)] = place
        self.parameters.append(weakref.ref(parameter))
        self.signatures.append(_signature(parameter))
        return place

    def optimizer(self, optimizer: Optimizer) -> int:
        """The number of an optimizer; it is written down at first sight, and again where it has more parameters."""
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        known = self.optimizers.get(id(optimizer))
        is_known = known is not None and known[0]() is optimizer
        number = known[1] if known is not None and is_known else len(self.optimizers)
        ids = list(map(id, own))
        if ids != self._own_ids.get(number):
            if not is_known:
                self.optimizers[id(optimizer)] = (weakref.ref(optimizer), number)
            self._own_ids[number] = ids
            self.owned[number] = numbers = [self.number(parameter) for parameter in own]
            self._probe(own)
            self.write(
                "optimizer",
                optimizer=number,
                kind=type(optimizer).__name__,
                parameters=packed(numbers),
                place=here(),
            )
        return number

    def _probe(self, parameters: list[Tensor]) -> None:
        wanted = [p for p in parameters if isinstance(p, Tensor) and p.requires_grad and type(p.data) is Tensor]
        step = max(1, len(wanted) // PROBED)
        for parameter in wanted[::step][:PROBED]:
            number = self.number(parameter)
            if number not in self.probes and parameter.numel():
                stride = max(1, parameter.numel() // ELEMENTS)
                self.probes[number] = (min(ELEMENTS, parameter.numel()), stride)
                parameter.register_hook(_Arrival(self, number))

    def probe_values(self, numbers: Iterable[int]) -> dict[str, str]:
        """The probed numbers of the gradients as they are now."""
        values = {}
        for number in numbers:
            parameter = self.parameters[number]() if number in self.probes else None
            if parameter is not None and parameter.grad is not None and not parameter.grad.is_sparse:
                values[str(number)] = as_hex(_probed(parameter.grad, self.probes[number]))
        return values

    def take_arrived(self) -> dict[str, str]:
        """The probed gradients of the pass that has just run."""
        arrived, self.arrived = self.arrived, {}
        return {str(number): as_hex(values) for number, values in arrived.items()}

    def look(self, *, is_zeroed: bool = False, place: Spot | None = None) -> None:
        """Compare every gradient with what it was, and write down what changed since."""
        now = self._now()
        changed = self._changed(now)
        if not changed:
            return
        how: dict[str, list[int]] = {"cleared": [], "assigned": [], "modified": []}
        for number in changed:
            before, after = self.signatures[number], now[number]
            if after is None or is_zeroed or self._is_zero(number):
                how["cleared"].append(number)
            else:
                how["assigned" if before is None or before[0] != after[0] else "modified"].append(number)
        self.signatures = now
        spot = place or here()
        if how["cleared"] and not is_zeroed:
            spot = _cleared_above(spot)
        for name, numbers in how.items():
            if numbers:
                self.write("changed", how=name, parameters=packed(numbers), place=spot)

    def _is_zero(self, number: int) -> bool:
        parameter = self.parameters[number]()
        gradient = None if parameter is None else parameter.grad
        return gradient is not None and not gradient.is_sparse and not bool(gradient.any())

    def forget_changes(self) -> list[int]:
        """Take the gradients as they are, and say which changed."""
        now = self._now()
        changed = self._changed(now)
        self.signatures = now
        return changed

    def _changed(self, now: list[Signature]) -> list[int]:
        before = self.signatures
        return [] if now == before else [n for n, one in enumerate(now) if one != before[n]]

    def _now(self) -> list[Signature]:
        """A collected parameter keeps its last signature: it was not zeroed."""
        return [
            before
            if (parameter := reference()) is None
            else (id(gradient), version_of(gradient))
            if type(gradient := parameter.grad) is Tensor
            else _signature(parameter)
            for reference, before in zip(self.parameters, self.signatures, strict=True)
        ]


class _Arrival:
    """The hook on a probed parameter: notes what backward brings, and changes nothing."""

    __torch_unserializable__ = True

    def __init__(self, log: EventLog, number: int) -> None:
        self._log, self._number = weakref.ref(log), number

    def __call__(self, gradient: Tensor) -> None:
        log = self._log()
        if log is None or log.is_ended or log.is_broken or gradient.is_sparse or type(gradient) is not Tensor:
            return
        taken = _probed(gradient, log.probes[self._number])
        before = log.arrived.get(self._number)
        log.arrived[self._number] = taken if before is None else [a + b for a, b in zip(before, taken, strict=True)]


def _probed(gradient: Tensor, probe: tuple[int, int]) -> list[float]:
    count, stride = probe
    flat = gradient if gradient.is_contiguous() else gradient.contiguous()
    return flat.as_strided((count,), (stride,)).tolist()


def _signature(parameter: Tensor) -> Signature:
    gradient = parameter.grad
    if gradient is None:
        return None
    local: Any = gradient
    if type(gradient) is not Tensor and hasattr(gradient, "to_local"):
        local = local.to_local()  # a shard is written to, not its wrapper
    return id(gradient), version_of(local)


_OURS = str(Path(__file__).parents[2]) + os.sep
_STDLIB = os.path.dirname(os.__file__) + os.sep


@cache
def _owner(filename: str) -> str:
    """Tell the user's own code from anybatch ("ours") and from torch, installed packages and Python ("library")."""
    if filename.startswith(_OURS):
        return "ours"
    is_installed = "site-packages" in filename or "dist-packages" in filename
    return "library" if is_installed or filename.startswith(("<", _STDLIB)) else "user"


def user_frames(most: int = 200) -> Iterator[FrameType]:
    """The frames of the user's own code, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and most:
        if _owner(frame.f_code.co_filename) == "user":
            yield frame
        frame, most = frame.f_back, most - 1


_CLEARS = re.compile(r"\.grad\s*=\s*None|\.grad\.(zero_|detach_)\(|\.grad\.data\.zero_\(|\.grad\.fill_\(")


def _cleared_above(place: Spot, most: int = 40) -> Spot:
    """The line above that clears gradients by hand, which is seen only when backward comes; `place` where there is none."""
    for line in range(place.line - 1, max(0, place.line - most), -1):
        if _CLEARS.search(linecache.getline(place.file, line)):
            return replace(place, line=line)
    return place


def here() -> Spot:
    """The innermost line of the user's, worked out once for a chain of calls: a loop comes by again and again."""
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
"""By the identity of the code that led there, which is kept alive: to hash code takes longer than all else."""


def _place(via: CodeType | None, codes: list[CodeType], lines: list[int]) -> Spot:
    through = "" if via is None else via.co_name
    if not codes:
        return Spot("", 0, "", through, "")
    files = [code.co_filename for code in codes]
    mark = f"{zlib.crc32(repr(list(zip(files, lines, strict=True))).encode()):08x}"
    return Spot(os.path.abspath(files[0]), lines[0], codes[0].co_name, through, mark)


class Patches:
    """Replaced functions of torch, with their originals."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any, bool]] = []
        self.handles: list[Any] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """`owner.name` becomes `make(what it was)`."""
        original = getattr(owner, name)
        is_own = name in vars(owner)
        replacement = make(original)
        with suppress(AttributeError):
            replacement = wraps(original)(replacement)
        replacement.is_doctors = True
        self._before.append((owner, name, vars(owner).get(name), is_own))
        setattr(owner, name, replacement)

    def undo(self) -> None:
        """Everything as it was."""
        for owner, name, original, is_own in reversed(self._before):
            if is_own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
        for handle in self.handles:
            handle.remove()
        self._before, self.handles = [], []
