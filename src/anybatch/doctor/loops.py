"""From logs to loops: reads the log of a process, and follows which passes lay in the gradients when an optimizer stepped.

The rules see `WatchedLoop`, the whole process, and `OptimizerRun`, one optimizer of it. The recorder writes logs with the
functions at the end; torch is not needed to read them.
"""

import json
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from anybatch.doctor.finding import Finding, Severity, Spot, finding_at
from anybatch.doctor.updates import Happening, LoopUpdate, LossPass, LossTerm, Lost, Probe, Weighing, ratio_by_hand

SUFFIX = ".doctor.jsonl"
LARGEST_LINE = 4_000_000
"""Characters of a line that is still read: a log is a file that anyone may have written."""
HAPPENINGS = ("clip", "schedule", "unscale", "scaler-update", "zero")
KEPT_AS_THEY_ARE = ("kept", "unowned", "trouble", "read")
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Log:
    """Events of one process, in order."""

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
        for line in _events(text) if len(text) <= LARGEST_LINE else ():
            if line["event"] == "place":
                places[len(places)] = line
                continue
            if isinstance(line.get("place"), int):
                line["place"] = places.get(line["place"], {})
            yield line


def _events(text: str) -> list[Line]:
    """None where a line is torn, or not ours."""
    try:
        read = json.loads(text)
    except ValueError:
        return []
    events = read if isinstance(read, list) else [read]
    return [event for event in events if isinstance(event, dict) and isinstance(event.get("event"), str)]


class WatchedLoop:
    """One process, made from its log; follows what lies in every parameter's gradient, line by line."""

    def __init__(self, log: Log) -> None:
        self.rank, self.world, self.reason = log.rank, 1, "killed"
        self.optimizers: dict[int, dict[str, Any]] = {}
        self.updates: list[LoopUpdate] = []
        self.happenings: list[Happening] = []
        self.epochs: list[Line] = []
        """As they begin, with `index` and `spot`."""
        self.epoch_ends: list[Line] = []
        self.intended: dict[str, int] = {}
        """Variables that look like the number of micro-batches."""
        self.intended_epochs: dict[str, int] = {}
        self.lengths: dict[str, int] = {}
        """Lengths of lists in the user's variables, which may hold batches."""
        self.others: dict[str, list[Line]] = defaultdict(list)
        """Lines that are taken as they are: kept, unowned, trouble, read, skipped."""
        self._passes: dict[int, LossPass] = {}
        self._contents: dict[int, list[int]] = defaultdict(list)
        """Passes by parameter."""
        self._pending: list[int] = []
        """Passes whose gradients are not yet in `.grad`."""
        self._assigned: set[int] = set()
        self._used_by: dict[int, set[int]] = defaultdict(set)
        """Passes that an optimizer has stepped on."""
        self._used: set[int] = set()
        self._removed: dict[int, tuple[int, Spot]] = {}
        """Index and line at which a pass was last taken out of a gradient."""
        self._stepping = 0
        for index, line in enumerate(log.lines):
            self._read(index, line)
        self.passes = tuple(self._passes.values())
        self.lost = self._find_lost()

    def updates_of(self, optimizer: int) -> list[LoopUpdate]:
        """Updates of one optimizer, in order."""
        return [update for update in self.updates if update.optimizer == optimizer]

    def _read(self, index: int, line: Line) -> None:
        event = line["event"]
        reader = getattr(self, f"_read_{event.replace('-', '_')}", None)  # None of an event that is not known
        if event in HAPPENINGS:
            self.happenings.append(_happening(event, index, line))
        elif event in KEPT_AS_THEY_ARE:
            self.others[event].append(line)
        elif reader is not None:
            reader(index, line)

    def _read_start(self, _: int, line: Line) -> None:
        self.world = int(line.get("world", 1))

    def _read_intent(self, _: int, line: Line) -> None:
        self.world = int(line.get("world", self.world))
        self.intended, self.intended_epochs, self.lengths = (
            dict(line.get(name, {})) for name in ("steps", "epochs", "lengths")
        )

    def _read_epoch(self, index: int, line: Line) -> None:
        self.epochs.append({**line, "index": index, "spot": spot_of(line.get("place"))})

    def _read_epoch_end(self, index: int, line: Line) -> None:
        self.epoch_ends.append({**line, "index": index})

    def _read_end(self, _: int, line: Line) -> None:
        self.reason = str(line.get("reason", "finished"))

    def _read_optimizer(self, _: int, line: Line) -> None:
        self.optimizers[line["optimizer"]] = {**line, "numbers": unpacked(line["parameters"])}

    def _read_step_begin(self, _: int, __: Line) -> None:
        self._stepping += 1

    def _read_backward(self, index: int, line: Line) -> None:
        one = _pass(index, line)
        self._passes[one.serial] = one
        if one.sync == (False, False) and not one.touched:
            self._pending.append(one.serial)  # FSDP2 keeps it elsewhere until ranks synchronise
            return
        for number in one.touched:
            self._contents[number] += [*self._pending, one.serial]
        if one.touched:
            for serial in self._pending:
                self._passes[serial] = replace(self._passes[serial], touched=one.touched)
            self._pending = []

    def _read_changed(self, index: int, line: Line) -> None:
        numbers = unpacked(line["parameters"])
        if line["how"] != "cleared":
            self._assigned |= numbers
            self.happenings.append(_happening("modified", index, line))
            return
        spot = spot_of(line.get("place"))
        for number in numbers:
            for serial in self._contents.pop(number, ()):
                self._removed[serial] = (index, spot)
                if self._stepping:  # a closure: what step() clears is its own affair
                    self._used.add(serial)
        self._assigned -= numbers
        if not self._stepping:
            self.happenings.append(_happening("cleared", index, line))

    def _read_skipped(self, _: int, line: Line) -> None:
        """An overflow: its passes were looked at and rightly left alone."""
        self._used |= self._held(line["optimizer"])
        self.others["skipped"].append(line)

    def _read_step(self, index: int, line: Line) -> None:
        self._stepping = max(0, self._stepping - 1)
        number = line["optimizer"]
        held = self._held(number)
        if not held and not line.get("holding"):
            held, self._pending = set(self._pending), []  # FSDP2 never synchronised, so that the step had nothing
        known = self._used_by[number]
        earlier = self.updates_of(number)
        since = earlier[-1].index if earlier else -1
        self.updates.append(
            LoopUpdate(
                number=len(earlier) + 1,
                optimizer=number,
                index=index,
                seconds=float(line.get("t", 0)),
                spot=spot_of(line.get("place")),
                passes=tuple(self._passes[serial] for serial in sorted(held - known)),
                stale=tuple(sorted(held & known)),
                happenings=tuple(one for one in self.happenings if one.index > since),
                lr=tuple(line.get("lr", ())),
                probe=_probe(line.get("probe")),
                is_assigned=bool(self._assigned & self.parameters_of(number)),
                is_in_scaler=bool(line.get("scaler")),
                is_empty=not line.get("holding"),
            )
        )
        known |= held
        self._used |= held

    def parameters_of(self, optimizer: int) -> frozenset[int]:
        """By their numbers."""
        return self.optimizers.get(optimizer, {}).get("numbers", frozenset())  # type: ignore[no-any-return]

    def _held(self, optimizer: int) -> set[int]:
        return {serial for number in self.parameters_of(optimizer) for serial in self._contents.get(number, ())}

    def _find_lost(self) -> list[Lost]:
        left = {serial for serials in self._contents.values() for serial in serials}
        owned = {number for one in self.optimizers.values() for number in one["numbers"]}
        lost = []
        for serial, one in sorted(self._passes.items()):
            if serial not in self._used and one.touched & owned:
                index, spot = self._removed.get(serial, (one.index, one.spot))
                lost.append(Lost(loss_pass=one, spot=spot, index=index, is_left=serial in left))
        return lost


@dataclass(frozen=True)
class OptimizerRun:
    """One optimizer of one loop."""

    loop: WatchedLoop
    optimizer: int

    @cached_property
    def updates(self) -> list[LoopUpdate]:
        """Updates that had something to step on."""
        return [update for update in self.loop.updates_of(self.optimizer) if update.passes or update.stale]

    @cached_property
    def weighed(self) -> list[tuple[LoopUpdate, Weighing]]:
        """Updates whose losses could be read, with the weights."""
        return [(update, update.weighing) for update in self.updates if update.weighing is not None]

    @cached_property
    def size(self) -> int:
        """Micro-batches of the usual update within an epoch; of equally frequent numbers the larger."""
        within = [update for update in self.updates if not update.spans_epochs]
        counts = Counter(len(update.micro_batches) for update in within or self.updates)
        return max(counts, key=lambda size: (counts[size], size)) if counts else 0

    @cached_property
    def rows(self) -> int:
        """Rows of the usual micro-batch, 0 where unknown."""
        found = Counter(int(w.counts[0]) for _, w in self.weighed if w.counts and w.role != "Sum")
        loaded = Counter(one.rows for one in self.loop.passes if one.rows)
        return (loaded.most_common(1) or found.most_common(1) or [(0, 0)])[0][0] or 0

    @cached_property
    def is_usually_whole(self) -> bool:
        """The weights of some update of the usual size add up to 1."""
        full = [update for update, weighing in self.weighed if len(weighing.shares) == self.size]
        return not full or any(update.is_whole for update in full)

    @cached_property
    def without_tail(self) -> str:
        """Sentence to add where only our cutting of the epochs left a tail; empty where there is a real one."""
        batches = [one.batch for update in self.updates for one in update.passes if one.batch is not None]
        used, seen = {batch[0] for batch in batches}, max((batch[2] + 1 for batch in batches), default=0)
        whole = [int(one["whole"]) for one in self.loop.epochs if one["loader"] in used and one.get("whole")]
        if not whole or self.size < 2 or any(number % self.size or number <= seen for number in whole):
            return ""
        return (
            f" The whole epoch of {whole[0]} micro-batches has no such rest today; another number of rows would have."
        )

    @cached_property
    def robbed(self) -> frozenset[int]:
        """Updates of whose window some passes were cleared: what is left of it says nothing about the division."""
        lost = [one.loss_pass for one in self.loop.lost if not one.is_left]
        found, since = set(), -1
        for update in self.updates:
            chains = {one.spot.chain for one in update.passes}
            if any(since < one.index < update.index and one.spot.chain in chains for one in lost):
                found.add(update.number)
            since = update.index
        return frozenset(found)

    @cached_property
    def is_off_by_one(self) -> bool:
        """The first update has another size than those after it, and no reason for that."""
        sizes = [len(update.micro_batches) for update in self.updates]
        if self.size < 2 or len(sizes) < 3 or any(update.stale for update in self.updates):
            return False
        is_off = sizes[0] in (1, self.size - 1, self.size + 1) and sizes[0] != self.size
        is_usual_later = sizes[1:].count(self.size) >= 2
        return is_off and is_usual_later and not self.updates[0].spans_epochs and not self.updates[0].is_whole

    @cached_property
    def is_by_hand(self) -> bool:
        """Its gradients are not what backward brought."""
        steps = self.loop.updates_of(self.optimizer)
        assigned = [
            update for update in steps if update.is_assigned and (not update.passes or ratio_by_hand(update) is None)
        ]
        return 2 * len(assigned) >= len(steps) > 0

    @cached_property
    def numbers(self) -> frozenset[int]:
        """Numbers of its parameters."""
        return self.loop.parameters_of(self.optimizer)

    def clips(self) -> list[Happening]:
        """Clippings of its parameters, without mere measurements."""
        return [
            one
            for one in self.loop.happenings
            if one.kind == "clip" and one.facts.get("limit") is not None and one.parameters & self.numbers
        ]

    def finding(
        self, kind: str, severity: Severity, spot: Spot, message: str, evidence: Mapping[str, Any] | None = None
    ) -> Finding:
        """A finding with the fix for this number of micro-batches and rows."""
        meant = [number for number in self.loop.intended.values() if number > 1]
        size = self.size if self.size > 1 or not meant else meant[0]
        return finding_at(spot, kind, severity, message, evidence, num_micro_batches=size, rows=self.rows)

    def tail_finding(self, kind: str, spot: Spot, message: str, evidence: Mapping[str, Any]) -> Finding:
        """An error; a warning where only our cutting of the epochs left a tail."""
        severity: Severity = "warning" if self.without_tail else "error"
        return self.finding(kind, severity, spot, message + self.without_tail, evidence)


def spot_of(place: Any) -> Spot:
    """A place as the log has it; an empty one of anything else."""
    if not isinstance(place, Mapping):
        return Spot()
    line = place.get("line", 0)
    text = {name: str(place.get(name, "")) for name in ("file", "function", "via", "chain")}
    return Spot(line=line if isinstance(line, int) else 0, **text)


def _happening(kind: str, index: int, line: Line) -> Happening:
    return Happening(
        kind=kind,
        index=index,
        seconds=float(line.get("t", 0)),
        spot=spot_of(line.get("place")),
        parameters=unpacked(line.get("parameters", "")),
        facts=line,
    )


def _pass(index: int, line: Line) -> LossPass:
    batch, sync = line.get("batch"), line.get("sync")
    return LossPass(
        serial=int(line["serial"]),
        index=index,
        seconds=float(line.get("t", 0)),
        spot=spot_of(line.get("place")),
        terms=tuple(_term(term) for term in line.get("terms", ())),
        touched=unpacked(line.get("touched", "")),
        batch=None if not batch else (batch[0], batch[1], batch[2]),
        sync=None if sync is None else (bool(sync[0]), bool(sync[1])),
        probe=_probe(line.get("probe")),
        is_retained=bool(line.get("retained")),
        is_eval=bool(line.get("is_eval")),
        dtypes=tuple(line.get("dtypes", ())),
        norm_forwards=int(line.get("norm_forwards", 0)),
        **{name: line.get(name) for name in ("loss", "rows", "mark", "scale", "norms")},
    )


def _term(term: Mapping[str, Any]) -> LossTerm:
    return LossTerm(
        role=str(term["role"]),
        kind=str(term["kind"]),
        weight=float(term["weight"]),
        counts=tuple(map(float, term.get("counts", ()))),
        pairs=int(term.get("pairs", 0)),
    )


def _probe(values: Any) -> Probe:
    if not isinstance(values, Mapping):
        return {}
    return {key: from_hex(row) if isinstance(row, str) else tuple(map(float, row)) for key, row in values.items()}


def as_hex(values: list[float]) -> str:
    """Numbers to the last bit, in a form that costs little to write.

    >>> as_hex([0.5])
    '000000000000e03f'
    """
    return struct.pack(f"<{len(values)}d", *values).hex()


def from_hex(text: str) -> tuple[float, ...]:
    """Read the numbers that `as_hex` wrote.

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
