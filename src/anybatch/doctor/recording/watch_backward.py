"""Record backward passes: their terms, the gradients they touched, graphs that stay alive, reads of the loss."""

import linecache
import re
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anybatch.core import leaves_of
from anybatch.doctor.finding import Spot
from anybatch.doctor.log import packed
from anybatch.doctor.recording.event_log import EventLog, here, user_frames
from anybatch.doctor.recording.installing import Ending
from anybatch.doctor.recording.loss_terms import TermHook, reducing_nodes

WALKED = 2
"""Passes per line of code with a walk over the whole graph to find its leaves."""
OF_THE_BATCH = ("batch", "rows", "mark", "is_eval")
OF_ONE_PASS = ("scale", "norms", "norm_forwards")
"""Facts in `EventLog.current` for all passes of a batch, and for the next pass only."""
MOST_ALIVE = 6  # graphs; more are a leak
MOST_READS, MOST_USES, MOST_NAMES = 8, 12, 400
STEPS = re.compile(r"accum|grad(ient)?_acc|^acc_?steps|^n_?acc|^ga_steps|n(um)?_micro|micro_batches", re.I)
NOT_STEPS = re.compile(r"size|loss|total|count|idx|index|rows|seen|accumulated|correct", re.I)
EPOCHS = re.compile(r"^(num_?|n_?|max_?|total_?)?(train_?)?epochs?$|num_train_epochs|epochs_total", re.I)
_GROWS = re.compile(r"^\s*([\w.]+)(?:\[[^]]*\])?\s*\+?=[^=]")


class ReadingWatch:
    """Patches `Tensor.item` and `float()` to find reads of the loss, known by its address and value."""

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self._reads: dict[int, tuple[float, Spot]] = {}  # since the last pass; one may turn out to be its loss
        self._last: tuple[int, float, weakref.ref[Tensor]] | None = None
        self._logged: set[Spot] = set()
        note = log.safely(self._note)

        def make(original: Any) -> Any:
            def read(tensor: Any, *arguments: Any) -> Any:
                value = original(tensor, *arguments)
                if type(value) is float and not log.depth:
                    note(tensor, value)
                return value

            return read

        for name in ("item", "__float__"):
            log.patch(Tensor, name, make)

    def _note(self, tensor: Tensor, value: float) -> None:
        where, last = tensor.data_ptr(), self._last
        if last is not None and last[:2] == (where, value) and last[2]() is not None:
            self._log_read(here())
        elif len(self._reads) < MOST_READS:
            self._reads[where] = (value, here())

    def backward_of(self, loss: Tensor, value: float) -> None:
        """Note a loss that backward was given; log reads of it before and after."""
        where = loss.data_ptr()
        before = self._reads.get(where)
        self._reads = {}
        self._last = (where, value, weakref.ref(loss))
        if before is not None and before[0] == value:
            self._log_read(before[1])

    def _log_read(self, place: Spot) -> None:
        if place in self._logged or place.via not in ("", "__format__"):
            return  # a library reads for itself
        self._logged.add(place)
        text = linecache.getline(place.file, place.line).strip()
        name = _GROWS.match(text)
        variable = "" if name is None else name[1]
        self.log.write("read", place, text=text, variable=variable, uses=_uses(variable, place) if variable else [])


def _uses(name: str, place: Spot) -> list[str]:
    """Return the other lines of the file that use a variable."""
    lines = enumerate(linecache.getlines(place.file), start=1)
    word = re.compile(rf"(?<![\w.]){re.escape(name)}\b")
    return [line.strip() for number, line in lines if number != place.line and word.search(line)][:MOST_USES]


class _Sentinel:
    """Object in the metadata of a node; dies with the graph."""


class BackwardWatch:
    """Patches `torch.autograd.backward`, which `Tensor.backward` looks up at every call."""

    def __init__(self, log: EventLog) -> None:
        self.log, self.reading = log, ReadingWatch(log)
        self._alive: list[weakref.ref[_Sentinel]] = []
        self._walked: Counter[str] = Counter()
        self._leaves: dict[int, tuple[weakref.ref[Tensor], Spot]] = {}
        self._has_logged_kept = False
        self._logged_unowned: set[int] = set()
        self._compared = (0, 0)
        begin, end = log.safely(self._begin), log.safely(self._end)

        def make(original: Any) -> Any:
            def backward(tensors: Any, *arguments: Any, **named: Any) -> Any:
                if log.num_updates and log.reason == "updates" and not log.is_ended:
                    raise Ending(0)  # the script caught the first
                if log.depth or log.is_ended or log.is_broken:
                    return original(tensors, *arguments, **named)
                state = begin(tensors)
                log.depth += 1
                try:
                    result = original(tensors, *arguments, **named)
                finally:
                    log.depth -= 1
                retain = bool(named.get("retain_graph") or (len(arguments) > 1 and arguments[1]))
                end(state, tensors, retain)
                return result

            return backward

        log.patch(torch.autograd, "backward", make)

    def _begin(self, tensors: Any) -> Any:
        log, place = self.log, here()
        log.log_changes(place=place)
        log.arrived = {}
        (loss, *others) = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        has_terms = not others and loss.numel() == 1 and loss.grad_fn is not None
        hooks = [TermHook(node) for node in reducing_nodes(loss.grad_fn)] if has_terms else []
        if self._walked[place.chain] < WALKED:
            self._walked[place.chain] += 1
            for leaf in leaves_of([loss]):
                if isinstance(leaf, nn.Parameter):
                    self._leaves.setdefault(id(leaf), (weakref.ref(leaf), place))
        if not log.num_passes:
            log.write("intent", None, **_intended(), **_rank())
        module = log.current["ddp"]() if "ddp" in log.current else None
        flag = None if module is None else bool(module.require_backward_grad_sync)
        return place, hooks, flag

    def _end(self, state: Any, tensors: Any, is_retained: bool) -> None:
        if state is None:
            return
        log, (place, hooks, flag) = self.log, state
        loss = tensors if isinstance(tensors, Tensor) else next(iter(tensors))
        nodes = [hook.node for hook in hooks][:4]
        terms = [term for term in (hook.close() for hook in hooks) if term is not None]
        touched, current = log.accept_changes(), log.current
        found = [log.parameters[number]() for number in touched]
        dtypes = sorted({str(p.grad.dtype)[6:] for p in found if p is not None and p.grad is not None})
        forward = current.pop("sync", current.get("fsdp"))
        value: Any = loss.tolist() if loss.dim() == 0 else None
        event: dict[str, Any] = {"serial": log.num_passes, "terms": terms, "touched": packed(touched), "dtypes": dtypes}
        event["probe"] = log.take_arrived()
        if value is not None:
            event["loss"] = value
        if forward is not None:
            event["sync"] = [forward, flag if flag is not None else forward]
        if is_retained:
            event["retained"] = True
        event |= {name: current[name] for name in OF_THE_BATCH if current.get(name)}
        event |= {name: current.pop(name) for name in OF_ONE_PASS if name in current}
        log.write("backward", place, **event)
        log.num_passes += 1
        if value is not None:
            self.reading.backward_of(loss, value)
        self._note_alive(loss, place, nodes)
        self._log_unowned()

    def _note_alive(self, loss: Tensor, place: Spot, nodes: list[Any]) -> None:
        self._alive = [reference for reference in self._alive if reference() is not None]
        node: Any = nodes[0] if nodes else loss.grad_fn
        if node is not None:
            sentinel = _Sentinel()
            node.metadata["anybatch doctor"] = sentinel
            self._alive.append(weakref.ref(sentinel))
        if len(self._alive) > MOST_ALIVE and not self._has_logged_kept:
            self._has_logged_kept = True
            name, file, line = _keeper(loss)
            where = replace(place, file=file, line=line) if line else place
            self.log.write("kept", alive=len(self._alive), variable=name, place=where)

    def _log_unowned(self) -> None:
        """Log leaves of the graph that no optimizer has, once there were updates."""
        log = self.log
        known = (len(self._leaves), len(log.parameters))
        if not log.num_updates or log.num_passes <= 3 or known == self._compared:
            return
        self._compared = known
        if any(hasattr(reference(), "to_local") for reference in log.parameters):
            return  # FSDP2's graph has whole parameters, its optimizer has shards
        owned = {id(reference()) for reference in log.parameters}
        lost = [
            (key, leaf, place)
            for key, (reference, place) in self._leaves.items()
            if key not in self._logged_unowned and (leaf := reference()) is not None and id(leaf) not in owned
        ]
        if lost:
            self._logged_unowned |= {key for key, _, _ in lost}
            shapes = [list(leaf.shape) for _, leaf, _ in lost]
            log.write("unowned", shapes=shapes[:8], count=len(shapes), place=lost[0][2])


def _rank() -> dict[str, int]:
    """Return the rank from torch.distributed: a spawned process does not have it in its environment."""
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    return {"rank": dist.get_rank(), "world": dist.get_world_size()}


def _intended() -> dict[str, dict[str, int]]:
    """Guess the numbers of micro-batches and epochs from the names of variables, and return the lengths of lists."""
    steps: dict[str, int] = {}
    epochs: dict[str, int] = {}
    lengths: dict[str, int] = {}
    for frame in user_frames():
        for name, value in _numbers(frame):
            if STEPS.search(name) and not NOT_STEPS.search(name) and 1 <= value <= 4096:
                steps.setdefault(name, value)
            if EPOCHS.search(name) and name.lower() != "epoch" and 1 <= value <= 100_000:
                epochs.setdefault(name, value)
        for name, held in list(frame.f_locals.items())[:MOST_NAMES]:
            if isinstance(held, list | tuple) and len(held) > 3 and not name.startswith("_"):
                lengths.setdefault(name, len(held))
    return {"steps": steps, "epochs": epochs, "lengths": lengths}


def _numbers(frame: FrameType) -> Iterator[tuple[str, int]]:
    for scope in (frame.f_locals, frame.f_globals):
        for name, value in list(scope.items())[:MOST_NAMES]:
            if isinstance(value, int) and not isinstance(value, bool):
                yield name, value
            elif not name.startswith("__") and not isinstance(value, Tensor | ModuleType | type):
                yield from _fields(value)


def _fields(value: Any) -> Iterator[tuple[str, int]]:
    """Yield the ints in a dict, a namespace or a config object."""
    fields = value if isinstance(value, Mapping) else getattr(value, "__dict__", None)
    if isinstance(fields, Mapping) and len(fields) <= MOST_NAMES:
        for name, inner in list(fields.items()):
            if isinstance(name, str) and isinstance(inner, int) and not isinstance(inner, bool):
                yield name.lstrip("_"), inner


def _keeper(current: Tensor) -> tuple[str, str, int]:
    """Return the variable that holds most graphs of earlier losses, and the file and line on which it grows."""
    best, found = 0, ("", "", 0)
    for frame in user_frames():
        for name, value in [*frame.f_locals.items(), *frame.f_globals.items()][:MOST_NAMES]:
            held = _held(value, current)
            if held > best:
                best, found = held, (name, *_added_to(name, frame.f_code.co_filename))
    return found


def _added_to(name: str, filename: str) -> tuple[str, int]:
    """Return the file and the line on which a variable grows; line 0 if there is none."""
    word = re.escape(name)
    grows = re.compile(
        rf"\b{word}\s*\+=|\b{word}\s*=[^=].*\b{word}\b|\b{word}(\[[^]]*\])?\.(append|extend|add|update|setdefault)\(|\b{word}\["
    )
    lines = linecache.getlines(filename)
    return filename, next((number for number, line in enumerate(lines, 1) if grows.search(line.partition("#")[0])), 0)


def _held(value: Any, current: Tensor) -> int:
    if isinstance(value, Tensor):
        return 1 if value is not current and value.grad_fn is not None and value.numel() == 1 else 0
    if isinstance(value, Mapping) and len(value) < MOST_NAMES:
        value = list(value.values())
    if isinstance(value, list | tuple) or type(value).__name__ == "deque":
        return sum(_held(item, current) for item in list(value)[:1000] if isinstance(item, Tensor | list | tuple))
    return 0
