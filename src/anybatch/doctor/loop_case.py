"""A loop as the rules see it: one optimizer's updates with micro-batches and weights; and the fix of each kind as code."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from anybatch.doctor.finding import Finding, Severity
from anybatch.doctor.loops import (
    Happening,
    Lane,
    LoopUpdate,
    LossPass,
    Spot,
    WatchedLoop,
    Weighing,
    lanes_of,
    near,
    ratio_by_hand,
    weigh,
)


@dataclass(frozen=True)
class LoopCase:
    """One optimizer of one loop."""

    loop: WatchedLoop
    optimizer: int

    @cached_property
    def updates(self) -> tuple[LoopUpdate, ...]:
        """Those that had something to step on."""
        return tuple(update for update in self.loop.updates_of(self.optimizer) if update.passes or update.stale)

    @cached_property
    def lanes(self) -> tuple[tuple[Lane, ...], ...]:
        """The micro-batches of each update."""
        return tuple(lanes_of(update.passes) for update in self.updates)

    @cached_property
    def weighings(self) -> tuple[Weighing | None, ...]:
        """Of each update."""
        return tuple(weigh(update) for update in self.updates)

    @cached_property
    def size(self) -> int:
        """Micro-batches of the usual update within an epoch; of equally frequent numbers the larger."""
        within = [lanes for update, lanes in zip(self.updates, self.lanes, strict=True) if not spans(update.passes)]
        counts = Counter(len(lanes) for lanes in within or self.lanes)
        return max(counts, key=lambda size: (counts[size], size)) if counts else 0

    @cached_property
    def rows(self) -> int:
        """Rows of the usual micro-batch, 0 where unknown."""
        found = Counter(int(w.counts[0]) for w in self.weighings if w is not None and w.counts and w.role != "Sum")
        loaded = Counter(one.rows for one in self.loop.passes if one.rows)
        return (loaded.most_common(1) or found.most_common(1) or [(0, 0)])[0][0] or 0

    @cached_property
    def is_usually_whole(self) -> bool:
        """The weights of some update of the usual size add up to 1."""
        full = [w for w in self.weighings if w is not None and len(w.shares) == self.size]
        return not full or any(near(weighing.total, 1.0) for weighing in full)

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

    def is_whole(self, place: int) -> bool:
        """The weights of an update add up to 1: whatever its size is, it is meant so."""
        weighing = self.weighings[place]
        return weighing is not None and near(weighing.total, 1.0)

    @cached_property
    def is_off_by_one(self) -> bool:
        """The first update has another size than those after it, and no reason for that."""
        sizes = [len(lanes) for lanes in self.lanes]
        if self.size < 2 or len(sizes) < 3 or any(update.stale for update in self.updates):
            return False
        is_off = sizes[0] in (1, self.size - 1, self.size + 1) and sizes[0] != self.size
        is_usual_later = sizes[1:].count(self.size) >= 2
        return is_off and is_usual_later and not spans(self.updates[0].passes) and not self.is_whole(0)

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
        return self.loop.optimizers.get(self.optimizer, {}).get("numbers", frozenset())  # type: ignore[no-any-return]

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
        """With the fix."""
        meant = [number for number in self.loop.intended.values() if number > 1]
        fix = fix_for(kind, n=self.size if self.size > 1 or not meant else meant[0], rows=self.rows)
        return Finding(
            kind=kind,
            severity=severity,
            file=spot.file,
            line=spot.line,
            message=message,
            evidence=evidence or {},
            fix=fix,
        )


def first_spot(passes: tuple[LossPass, ...]) -> Spot:
    """Where the first of them was."""
    return passes[0].spot if passes else Spot()


def spans(passes: tuple[LossPass, ...]) -> bool:
    """Two epochs of one loader."""
    batches = {one.batch[:2] for one in passes if one.batch is not None}
    return len(batches) > len({loader for loader, _ in batches})


def plural(count: int, noun: str) -> str:
    """A number and its noun."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') and noun != 'epoch' else 's'}"


def fix_for(kind: str, *, n: int = 0, rows: int = 0) -> str:
    """The fix as text; what is not known stays a name."""
    own = OWN.get(kind, "")
    if not own:
        return ""
    size = str(rows) if rows else "16"
    batch = str(rows * n) if rows and n else "64"
    whole = own if kind in WITHOUT_LINES else own + ANYBATCH
    return whole.replace("{n}", str(n) if n > 1 else "n").replace("{rows}", size).replace("{batch}", batch)


ANYBATCH = """
or, with anybatch, where the loader yields the whole batch of {batch} rows:
    update = anybatch.Update(model, optimizer, anybatch.supervised(criterion), micro_batch={rows})
    for batch in loader:
        update(batch)"""


_FLUSH = """    in_this_update = min({n}, len(loader) - i // {n} * {n})
    (loss / in_this_update).backward()
    if (i + 1) % {n} == 0 or i + 1 == len(loader):"""


OWN = {
    "cleared-before-use": "clear only after the step:\n    optimizer.step()\n    optimizer.zero_grad()",
    "stepped-every-micro-batch": (
        "step and clear together, once per {n} micro-batches:\n    if (i + 1) % {n} == 0:\n        optimizer.step()\n"
        "        optimizer.zero_grad()"
    ),
    "not-divided": "divide the loss:\n    (loss / {n}).backward()",
    "divided-twice": "divide once; where a framework divides already, leave the loss as it is:\n    (loss / {n}).backward()",
    "other-divisor": "divide by the number of micro-batches that this update really has:\n    (loss / {n}).backward()",
    "tail-dropped": f"step on the last micro-batch of the epoch too, and divide by how many there are:\n{_FLUSH}",
    "tail-leaks": f"step on the last micro-batch of the epoch too, so that nothing is carried into the next:\n{_FLUSH}",
    "left-at-end": f"step once more after the last micro-batch:\n{_FLUSH}",
    "uneven-micro-batches": (
        "weight each micro-batch by what its mean divides by, over the whole update:\n"
        "    loss = criterion(outputs, targets)  # with reduction='sum'\n    (loss / units_of_all_micro_batches).backward()"
    ),
    "clip-early": "clip once, after the last backward of the update and before the step.",
    "clip-scaled": "unscale first:\n    scaler.unscale_(optimizer)\n    torch.nn.utils.clip_grad_norm_(...)",
    "clip-after-step": "clip before the step:\n    torch.nn.utils.clip_grad_norm_(...)\n    optimizer.step()",
    "schedule-per-micro-batch": "step the scheduler with the optimizer:\n    optimizer.step()\n    scheduler.step()",
    "schedule-before-step": "first the optimizer, then the scheduler:\n    optimizer.step()\n    scheduler.step()",
    "schedule-horizon": "make the schedule for updates:\n    num_training_steps = epochs * math.ceil(len(loader) / {n})",
    "scaler-misuse": (
        "scale every loss of the update with one scale; then, once per update:\n    scaler.unscale_(optimizer)\n"
        "    scaler.step(optimizer)\n    scaler.update()"
    ),
    "ddp-every-pass": (
        "synchronise in the last micro-batch only, forward and backward inside the block:\n"
        "    with nullcontext() if is_last else model.no_sync():"
    ),
    "ddp-backward-only": (
        "put the forward inside no_sync as well: DDP decides at forward.\n    with model.no_sync():\n"
        "        loss = criterion(model(inputs), targets)\n        loss.backward()"
    ),
    "ddp-never": "run the last micro-batch of every update, forward and backward, outside no_sync.",
    "batch-norm": "use GroupNorm or LayerNorm, or frozen statistics (model.eval() on these layers), or a larger micro-batch.",
    "never-cleared": "clear after every step:\n    optimizer.step()\n    optimizer.zero_grad()",
    "kept-graph": "keep the number, not the graph:\n    total += loss.item()      # or losses.append(loss.detach())",
    "unowned-parameters": "give them to the optimizer, or freeze them:\n    parameter.requires_grad_(False)",
    "low-precision-sum": "sum in fp32, before the first backward:\n    for p in model.parameters(): p.grad_dtype "
    "= torch.float32",
    "off-by-one": "count from one:\n    if (i + 1) % {n} == 0:",
    "negatives-missing": (
        "accumulating does not bring the negatives of other micro-batches back; cache the representations:\n"
        "    anybatch.Update(model, optimizer, anybatch.Coupled(encode, loss), micro_batch={rows})"
    ),
    "rows-repeated": "deal the rows out:\n    sampler = DistributedSampler(dataset, shuffle=True)",
    "windows-differ": "step all optimizers after the same micro-batches.",
    "loss-logged-divided": "log the loss as it was before the division:\n    print(loss.item() * {n})",
    "eval-left-on": "switch back after validation:\n    model.train()",
    "learning-rate": "raise it by the rule, and warm up:\n    anybatch.scale_lr(optimizer, batch={batch}, base_batch={rows})",
}


WITHOUT_LINES = (
    "negatives-missing",
    "learning-rate",
    "kept-graph",
    "unowned-parameters",
    "eval-left-on",
    "loss-logged-divided",
)
