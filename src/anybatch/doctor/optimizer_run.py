"""One optimizer of a loop as the rules see it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from anybatch.doctor.finding import Finding, Severity, Spot, finding_at
from anybatch.doctor.loops import WatchedLoop
from anybatch.doctor.updates import Happening, LoopUpdate, Weighing, ratio_by_hand


@dataclass(frozen=True)
class OptimizerRun:
    """One optimizer of one loop."""

    loop: WatchedLoop
    optimizer: int

    @cached_property
    def updates(self) -> list[LoopUpdate]:
        """Those that had something to step on."""
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
        """What to add where only our cutting of the epochs left a tail; empty where there is a real one."""
        batches = [one.batch for update in self.updates for one in update.passes if one.batch is not None]
        used, seen = {batch[0] for batch in batches}, max((batch[2] + 1 for batch in batches), default=0)
        whole = [
            int(line["whole"])
            for line in self.loop.epochs
            if line["event"] == "epoch" and line["loader"] in used and line.get("whole")
        ]
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
        """Of its parameters."""
        return self.loop.parameters_of(self.optimizer)

    def clips(self) -> list[Happening]:
        """Of its parameters, without mere measurements."""
        return [
            one
            for one in self.loop.happenings
            if one.kind == "clip" and one.facts.get("limit") is not None and one.parameters & self.numbers
        ]

    def finding(
        self, kind: str, severity: Severity, spot: Spot, message: str, evidence: Mapping[str, Any] | None = None
    ) -> Finding:
        """With the fix for this number of micro-batches and rows."""
        meant = [number for number in self.loop.intended.values() if number > 1]
        size = self.size if self.size > 1 or not meant else meant[0]
        return finding_at(spot, kind, severity, message, evidence, num_micro_batches=size, rows=self.rows)
