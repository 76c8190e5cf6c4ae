"""Training loops, rebuilt from logs: the passes that lay in the gradients each time an optimizer stepped.

Rules take a `WatchedLoop`, one process, or an `OptimizerRun`, one optimizer of it.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from anybatch.doctor.finding import Finding, Severity, Spot, finding_at
from anybatch.doctor.log import Event, Log, from_hex, spot_of, unpacked
from anybatch.doctor.updates import Action, LoopUpdate, LossPass, LossTerm, LostPass, Probe, Weighing, factor_by_hand

ACTIONS = ("clip", "schedule", "unscale", "scaler-update", "zero")


class WatchedLoop:
    """One process, rebuilt from its log by following the contents of each parameter's gradient from event to event."""

    def __init__(self, log: Log) -> None:
        self.rank = log.rank
        self.events: dict[str, list[Event]] = defaultdict(list)  # by kind, with `index` in the log and `spot`
        self.optimizers: dict[int, Event] = {}
        self.updates: list[LoopUpdate] = []
        self.actions: list[Action] = []
        self._passes: dict[int, LossPass] = {}
        self._contents: dict[int, list[int]] = defaultdict(list)  # passes by parameter
        self._pending: list[int] = []  # passes that are not yet in `.grad`
        self._assigned: set[int] = set()
        self._used_by: dict[int, set[int]] = defaultdict(set)  # passes that an optimizer has stepped on
        self._used: set[int] = set()
        self._removed: dict[int, tuple[int, Spot]] = {}  # index and line that last took a pass out of a gradient
        self._stepping = 0
        for index, logged in enumerate(log.events):
            event = {**logged, "index": index, "spot": spot_of(logged.get("place"))}
            kind = event["event"]
            self.events[kind].append(event)
            if kind in ACTIONS:
                self.actions.append(_action(kind, event))
            elif kind in ("optimizer", "backward", "changed", "step-begin", "step", "skipped"):
                getattr(self, f"_read_{kind.replace('-', '_')}")(event)
        self.passes = tuple(self._passes.values())
        self.lost = self._find_lost()
        self.epochs, self.epoch_ends = self.events["epoch"], self.events["epoch-end"]
        worlds = [int(one["world"]) for one in self.events["start"] + self.events["intent"] if "world" in one]
        self.world = worlds[-1] if worlds else 1
        intent = (self.events["intent"] or [{}])[-1]
        self.intended: dict[str, int] = intent.get("steps", {})  # variables that may be the number of micro-batches
        self.intended_epochs: dict[str, int] = intent.get("epochs", {})
        self.lengths: dict[str, int] = intent.get("lengths", {})  # lengths of the user's lists, which may hold batches
        ends = self.events["end"]
        self.reason = str(ends[-1].get("reason", "finished")) if ends else "killed"

    def updates_of(self, optimizer: int) -> list[LoopUpdate]:
        return [update for update in self.updates if update.optimizer == optimizer]

    def parameters_of(self, optimizer: int) -> frozenset[int]:
        return self.optimizers.get(optimizer, {}).get("numbers", frozenset())  # type: ignore[no-any-return]

    def _held(self, optimizer: int) -> set[int]:
        return {serial for number in self.parameters_of(optimizer) for serial in self._contents.get(number, ())}

    def _read_optimizer(self, event: Event) -> None:
        self.optimizers[event["optimizer"]] = {**event, "numbers": unpacked(event["parameters"])}

    def _read_backward(self, event: Event) -> None:
        one = _pass(event)
        self._passes[one.serial] = one
        if one.sync == (False, False) and not one.touched:
            self._pending.append(one.serial)  # FSDP2 keeps its gradient elsewhere until ranks synchronise
        elif one.touched:
            for number in one.touched:
                self._contents[number] += [*self._pending, one.serial]
            for serial in self._pending:
                self._passes[serial] = replace(self._passes[serial], touched=one.touched)
            self._pending = []

    def _read_changed(self, event: Event) -> None:
        numbers = unpacked(event["parameters"])
        if event["how"] != "cleared":
            self._assigned |= numbers
            self.actions.append(_action("modified", event))
            return
        for number in numbers:
            for serial in self._contents.pop(number, ()):
                self._removed[serial] = (event["index"], event["spot"])
                if self._stepping:  # a closure: step() may clear as it likes
                    self._used.add(serial)
        self._assigned -= numbers
        if not self._stepping:
            self.actions.append(_action("cleared", event))

    def _read_skipped(self, event: Event) -> None:
        """Count the passes of a step that a loss scaler skipped as used."""
        self._used |= self._held(event["optimizer"])

    def _read_step_begin(self, _: Event) -> None:
        self._stepping += 1

    def _read_step(self, event: Event) -> None:
        self._stepping = max(0, self._stepping - 1)
        optimizer = event["optimizer"]
        held = self._held(optimizer)
        if not held and not event.get("holding"):
            held, self._pending = set(self._pending), []  # FSDP2 never synchronised: the step had no gradients
        known = self._used_by[optimizer]
        earlier = self.updates_of(optimizer)
        since = earlier[-1].index if earlier else -1
        self.updates.append(
            LoopUpdate(
                number=len(earlier) + 1,
                optimizer=optimizer,
                index=event["index"],
                seconds=float(event.get("t", 0)),
                spot=event["spot"],
                passes=tuple(self._passes[serial] for serial in sorted(held - known)),
                stale=tuple(sorted(held & known)),
                actions=tuple(one for one in self.actions if one.index > since),
                lr=tuple(event.get("lr", ())),
                probe=_probe(event.get("probe")),
                is_assigned=bool(self._assigned & self.parameters_of(optimizer)),
                is_in_scaler=bool(event.get("scaler")),
                is_empty=not event.get("holding"),
            )
        )
        known |= held
        self._used |= held

    def _find_lost(self) -> list[LostPass]:
        left = {serial for serials in self._contents.values() for serial in serials}
        owned = {number for one in self.optimizers.values() for number in one["numbers"]}
        lost = []
        for serial, one in sorted(self._passes.items()):
            if serial not in self._used and one.touched & owned:
                index, spot = self._removed.get(serial, (one.index, one.spot))
                lost.append(LostPass(loss_pass=one, spot=spot, index=index, is_left=serial in left))
        return lost


def _action(kind: str, event: Event) -> Action:
    return Action(
        kind=kind,
        index=event["index"],
        seconds=float(event.get("t", 0)),
        spot=event["spot"],
        parameters=unpacked(event.get("parameters", "")),
        facts=event,
    )


def _pass(event: Event) -> LossPass:
    batch, sync = event.get("batch"), event.get("sync")
    return LossPass(
        serial=int(event["serial"]),
        index=event["index"],
        seconds=float(event.get("t", 0)),
        spot=event["spot"],
        terms=tuple(LossTerm(**{**term, "counts": tuple(term["counts"])}) for term in event.get("terms", ())),
        touched=unpacked(event.get("touched", "")),
        batch=None if not batch else (batch[0], batch[1], batch[2]),
        sync=None if sync is None else (bool(sync[0]), bool(sync[1])),
        probe=_probe(event.get("probe")),
        is_retained=bool(event.get("retained")),
        is_eval=bool(event.get("is_eval")),
        dtypes=tuple(event.get("dtypes", ())),
        norm_forwards=int(event.get("norm_forwards", 0)),
        **{name: event.get(name) for name in ("loss", "rows", "mark", "scale", "norms")},
    )


def _probe(values: Any) -> Probe:
    if not isinstance(values, Mapping):
        return {}
    return {key: from_hex(row) if isinstance(row, str) else tuple(map(float, row)) for key, row in values.items()}


@dataclass(frozen=True)
class OptimizerRun:
    """One optimizer of one loop."""

    loop: WatchedLoop
    optimizer: int

    @cached_property
    def steps(self) -> list[LoopUpdate]:
        return self.loop.updates_of(self.optimizer)

    @cached_property
    def updates(self) -> list[LoopUpdate]:
        """Steps that had gradients."""
        return [update for update in self.steps if update.passes or update.stale]

    @cached_property
    def weighed(self) -> list[tuple[LoopUpdate, Weighing]]:
        """Updates with readable losses, and their weights."""
        return [(update, update.weighing) for update in self.updates if update.weighing is not None]

    @cached_property
    def size(self) -> int:
        """Micro-batches of the usual update within an epoch; the larger of two equally frequent numbers."""
        within = [update for update in self.updates if not update.spans_epochs]
        counts = Counter(len(update.micro_batches) for update in within or self.updates)
        return max(counts, key=lambda size: (counts[size], size)) if counts else 0

    @cached_property
    def rows(self) -> int:
        """Rows of the usual micro-batch; 0 if unknown."""
        found = Counter(int(w.counts[0]) for _, w in self.weighed if w.counts and w.role != "Sum")
        loaded = Counter(one.rows for one in self.loop.passes if one.rows)
        return (loaded.most_common(1) or found.most_common(1) or [(0, 0)])[0][0] or 0

    @cached_property
    def parameters(self) -> frozenset[int]:
        return self.loop.parameters_of(self.optimizer)

    @cached_property
    def clips(self) -> list[Action]:
        """Clippings of its parameters; without those to infinity, which only measure."""
        clips = [one for one in self.loop.actions if one.kind == "clip" and one.facts.get("limit") is not None]
        return [one for one in clips if one.parameters & self.parameters]

    @cached_property
    def is_usually_whole(self) -> bool:
        """True if the weights of some update of the usual size add up to 1."""
        full = [update for update, weighing in self.weighed if len(weighing.shares) == self.size]
        return not full or any(update.is_whole for update in full)

    @cached_property
    def partly_cleared(self) -> frozenset[int]:
        """Updates that lost some passes before the step; their weights say nothing about the division."""
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
        """True if the first update has another size than those after it, for no reason."""
        sizes = [len(update.micro_batches) for update in self.updates]
        if self.size < 2 or len(sizes) < 3 or any(update.stale for update in self.updates):
            return False
        is_off = sizes[0] in (1, self.size - 1, self.size + 1) and sizes[0] != self.size
        is_usual_later = sizes[1:].count(self.size) >= 2
        return is_off and is_usual_later and not self.updates[0].spans_epochs and not self.updates[0].is_whole

    @cached_property
    def is_by_hand(self) -> bool:
        """True if most of its gradients are no multiple of what backward produced."""
        assigned = [one for one in self.steps if one.is_assigned and (not one.passes or factor_by_hand(one) is None)]
        return 2 * len(assigned) >= len(self.steps) > 0

    @cached_property
    def no_tail_note(self) -> str:
        """Sentence to add if only `--short-epochs` made the tail; empty if the whole epoch has one."""
        batches = [one.batch for update in self.updates for one in update.passes if one.batch is not None]
        used, seen = {batch[0] for batch in batches}, max((batch[2] + 1 for batch in batches), default=0)
        whole = [int(one["whole"]) for one in self.loop.epochs if one["loader"] in used and one.get("whole")]
        if not whole or self.size < 2 or any(number % self.size or number <= seen for number in whole):
            return ""
        return (
            f" The whole epoch of {whole[0]} micro-batches has no such rest today; another number of rows would have."
        )

    def finding(
        self, kind: str, severity: Severity, spot: Spot, message: str, evidence: Mapping[str, Any] | None = None
    ) -> Finding:
        """Return a finding with the fix for this number of micro-batches and rows."""
        meant = [number for number in self.loop.intended.values() if number > 1]
        size = self.size if self.size > 1 or not meant else meant[0]
        return finding_at(spot, kind, severity, message, evidence, num_micro_batches=size, rows=self.rows)

    def tail_finding(self, kind: str, spot: Spot, message: str, evidence: Mapping[str, Any]) -> Finding:
        """Return an error; a warning if only `--short-epochs` made the tail."""
        severity: Severity = "warning" if self.no_tail_note else "error"
        return self.finding(kind, severity, spot, message + self.no_tail_note, evidence)
