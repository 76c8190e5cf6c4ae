"""Rules on the order of events and on ranks: clipping, schedules, loss scalers, synchronisation, the rows of each rank."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from anybatch.display import plural
from anybatch.doctor.finding import Finding, Severity, Spot, finding_at
from anybatch.doctor.log import Event
from anybatch.doctor.loops import OptimizerRun, WatchedLoop
from anybatch.doctor.updates import Action, LoopUpdate, LossPass


def order_rules(run: OptimizerRun) -> Iterator[Finding]:
    """Apply the rules on clipping, loss scalers and schedules."""
    yield from _clipping(run)
    for update in run.updates:
        yield from _scaling(run, update)
    schedules: dict[int, list[Action]] = defaultdict(list)
    for one in run.loop.actions:
        if one.kind == "schedule" and one.facts.get("optimizer") == run.optimizer:
            schedules[int(one.facts.get("scheduler", 0))].append(one)
    for steps in schedules.values():
        yield from _schedule(run, steps)


def _clipping(run: OptimizerRun) -> Iterator[Finding]:
    for update in run.updates:
        for clip in run.clips:
            if update.is_between(clip.index) and not run.is_by_hand:
                text = (
                    f"Gradients are clipped to {clip.facts['limit']:g} between the micro-batches of update {update.number}: "
                    f"what is clipped is a part of the sum, and each micro-batch is cut by another factor."
                )
                facts = {"limit": clip.facts["limit"], "norm": clip.facts.get("norm")}
                yield run.finding("clip-early", "error", clip.spot, text, facts)
        yield from _clip_scaled(run, update)
    yield from _clip_late(run)


def _clip_scaled(run: OptimizerRun, update: LoopUpdate) -> Iterator[Finding]:
    scales = [one.scale for one in update.passes if one.scale not in (None, 1.0)]
    if not scales:
        return
    first = min((one.index for one in update.actions if _unscales(one, run)), default=update.index)
    for clip in run.clips:
        if update.passes[0].index < clip.index < update.index and clip.index < first:
            text = (
                f"Gradients are clipped to {clip.facts['limit']:g} while they are still multiplied with the loss scale "
                f"{scales[-1]:g}: the limit on the real gradient is {clip.facts['limit'] / scales[-1]:.3g}."
            )
            facts = {"scale": scales[-1], "norm": clip.facts.get("norm")}
            yield run.finding("clip-scaled", "error", clip.spot, text, facts)


def _unscales(one: Action, run: OptimizerRun) -> bool:
    return one.kind == "unscale" and one.facts.get("optimizer") == run.optimizer


def _clip_late(run: OptimizerRun) -> Iterator[Finding]:
    """Find clips between a step and the next pass."""
    touching = [one.index for one in run.loop.passes if one.touched & run.parameters]
    late = []
    for clip in run.clips:
        step = max((update.index for update in run.steps if update.index < clip.index), default=None)
        if step is not None and not any(step < index < clip.index for index in touching):
            late.append(clip)
    if late and 2 * len(late) >= len(run.steps) - 1:
        text = (
            f"Gradients are clipped to {late[0].facts['limit']:g} after the step that they were meant for: no update "
            "is clipped."
        )
        facts = {"clips": len(late), "steps": len(run.steps)}
        yield run.finding("clip-after-step", "error", late[0].spot, text, facts)


def _scaling(run: OptimizerRun, update: LoopUpdate) -> Iterator[Finding]:
    scales = [one.scale for one in update.passes]
    if all(scale is None for scale in scales):
        return
    for one in update.actions:
        if not update.is_between(one.index):
            continue
        if one.kind == "scaler-update":
            text = (
                f"scaler.update() runs between the micro-batches of update {update.number}: parts of one sum may have "
                "different scales."
            )
            yield run.finding("scaler-misuse", "error", one.spot, text, {"scale": one.facts.get("scale")})
        if _unscales(one, run):
            text = (
                f"scaler.unscale_() runs between the micro-batches of update {update.number}: what comes after is added "
                f"with the scale {scales[-1]:g} to gradients without it."
            )
            yield run.finding("scaler-misuse", "error", one.spot, text, {"scale": scales[-1]})
    if len(set(scales)) > 1:
        text = f"The micro-batches of update {update.number} have different loss scales: {', '.join(map(str, scales[:6]))}."
        yield run.finding("scaler-misuse", "error", update.passes[-1].spot, text, {"scales": scales[:8]})
    is_unscaled = update.is_in_scaler or any(one.kind == "unscale" for one in update.actions)
    if not is_unscaled and scales[-1] not in (None, 1.0):
        text = (
            f"The optimizer steps on gradients that are multiplied with the loss scale {scales[-1]:g}: it was not "
            "stepped by scaler.step()."
        )
        yield run.finding("scaler-misuse", "error", update.spot, text, {"scale": scales[-1]})


def _schedule(run: OptimizerRun, steps: list[Action]) -> Iterator[Finding]:
    several = [update for update in run.updates if len(update.micro_batches) > 1]
    within = [update for update in several if any(update.is_between(one.index) for one in steps)]
    per_update = len(steps) / max(1, len(run.updates))
    facts = {"schedule_steps": len(steps), "updates": len(run.updates), "micro_batches_per_update": run.size}
    if several and 2 * len(within) > len(several):
        text = (
            f"The schedule is stepped in every micro-batch: {len(steps)} times in {plural(len(run.updates), 'update')}, "
            f"so it runs {max(per_update, 2):.0f} times as fast as the updates."
        )
        yield run.finding("schedule-per-micro-batch", "error", steps[0].spot, text, facts)
        return
    stepped = [update for update in run.updates if update.passes]
    early = [u for u in stepped if any(u.passes[-1].index < one.index < u.index for one in steps)]
    first = run.updates[0].index if run.updates else -1
    ahead = sum(one.index < first for one in steps)
    is_before_first = ahead == 1 and len(steps) > 1 and not run.loop.events["skipped"]
    if run.updates and (2 * len(early) > len(run.updates) or is_before_first):
        text = (
            "The schedule is stepped before the optimizer: the first learning rate is never used, and every later "
            "one an update early."
        )
        yield run.finding("schedule-before-step", "error", steps[0].spot, text, facts)
    if per_update > 1.5 and len(run.updates) > 2:
        text = (
            f"The schedule is stepped {per_update:.3g} times per update ({len(steps)} times in {len(run.updates)}): it ends "
            f"after {100 / per_update:.0f} % of the updates that it was made for."
        )
        yield run.finding("schedule-horizon", "warning", steps[0].spot, text, facts)
        return
    yield from _horizon(run, steps, per_update)


def _horizon(run: OptimizerRun, steps: list[Action], per_update: float) -> Iterator[Finding]:
    horizon = steps[0].facts.get("horizon")
    if not isinstance(horizon, int) or run.size < 2 or not 0.7 < per_update < 1.4:
        return
    used = {one.batch[0] for update in run.updates for one in update.passes if one.batch is not None}
    begun = {int(one.get("whole") or 0) for one in run.loop.epochs if one["loader"] in used}
    whole = (begun | {int(one["fetched"]) for one in run.loop.epoch_ends if one["loader"] in used}) - {0}
    epochs = set(run.loop.intended_epochs.values())
    pairs = product({*whole, *run.loop.lengths.values()}, epochs)
    meant = [(length, count) for length, count in pairs if abs(length * count - horizon) <= 0.02 * horizon]
    seen = [math.ceil(length / run.size) * count for length, count in meant]
    if len(steps) > max([1.1 * math.ceil(horizon / run.size), *seen]):
        return  # it has made more steps than one made for micro-batches would
    finished = run.loop.reason == "finished" and abs(horizon / len(steps) / run.size - 1) < 0.25
    is_multiple = any(n > run.size and horizon % n == 0 and horizon // n <= 200 for n in whole)
    if not seen and not finished and not is_multiple:
        return
    gets = len(steps) if finished else math.ceil(horizon / run.size)
    left = _rate_left(str(steps[0].facts.get("kind")), str(steps[0].facts.get("by")), gets / horizon)
    severity: Severity = "error" if seen or finished else "warning"
    text = (
        f"The schedule was made for {horizon:,} steps and gets {gets:,}, one per update of {run.size} micro-batches: "
        f"it will end at {100 * gets / horizon:.0f} % of its course{left}."
    )
    facts = {"horizon": horizon, "steps": gets, "micro_batches_per_update": run.size}
    yield run.finding("schedule-horizon", severity, steps[0].spot, text, facts)


def _rate_left(kind: str, by: str, part: float) -> str:
    if kind == "CosineAnnealingLR" or "cosine" in by:
        return f", at {50 * (1 + math.cos(math.pi * part)):.0f} % of its learning rate instead of the lowest"
    if "linear" in by:
        return f", at {100 * (1 - part):.0f} % of its learning rate"
    return ""


def sync_rules(run: OptimizerRun) -> Iterator[Finding]:
    """Apply the rules on the gradient synchronisation of DDP and FSDP2."""
    for update in run.updates:
        synced = [(one, one.sync) for one in update.passes if one.sync is not None]
        if not synced:
            continue
        forward = [sync[0] for _, sync in synced]
        torn = [one for one, sync in synced if sync[0] and not sync[1]]
        facts = {"update": update.number, "synchronised": forward}
        if torn:
            text = (
                f"no_sync is around backward only ({len(torn)} of {len(synced)} passes of update {update.number}): DDP decides "
                "at forward, so these gradients are synchronised or not by accident, and are wrong."
            )
            yield run.finding("ddp-backward-only", "error", torn[0].spot, text, facts)
        elif not any(forward):
            came = (
                "FSDP2 keeps the gradients of such passes aside, and the step has none: nothing is learnt."
                if update.is_empty
                else "every rank steps on its own gradients, and the ranks drift apart."
            )
            text = f"No micro-batch of update {update.number} is synchronised: {came}"
            yield run.finding("ddp-never", "error", update.spot, text, facts)
        elif len(update.micro_batches) > 1 and all(forward):
            text = (
                f"Gradients are synchronised in all {len(synced)} micro-batches of update {update.number}; once is enough. "
                f"The result is the same, and {len(synced) - 1} of {len(synced)} reductions are for nothing."
            )
            yield run.finding("ddp-every-pass", "warning", synced[0][0].spot, text, facts)


def row_rules(loop: WatchedLoop, runs: list[OptimizerRun]) -> Iterator[Finding]:
    """Apply the rules on rows that count more than once, or never."""
    yield from _same_rows_again(runs)
    used = {one.batch[0] for one in loop.passes if one.batch is not None}
    for epoch in loop.epochs:
        if epoch["loader"] in used and loop.world > 1 and epoch["number"] <= 1:
            yield from _sampler(epoch, loop.world)


def rules_across_ranks(loops: Sequence[WatchedLoop]) -> Iterator[Finding]:
    """Find batches that two ranks share, such as those of a stream that is not split between them."""
    ranks = {loop.rank: _marks(loop) for loop in loops if any(one.sync is not None for one in loop.passes)}
    (first, own), *others = sorted(ranks.items()) or [(0, {})]
    for rank, theirs in others:
        same = own.keys() & theirs.keys()
        if len(own) > 1 and 2 * len(same) > len(theirs):
            text = (
                f"{len(same)} of {len(theirs)} batches of rank {rank} are the very batches of rank {first}: these rows count "
                "several times in an update, and the ranks do the same work."
            )
            facts = {"same": len(same), "batches": len(theirs), "ranks": [first, rank]}
            yield finding_at(theirs[min(same)], "rows-repeated", "error", text, facts)
            return


def _marks(loop: WatchedLoop) -> dict[float, Spot]:
    """Return the checksums of the first epoch's batches with the epoch's line; none if two batches share one."""
    begun = {(epoch["loader"], epoch["number"]): epoch["spot"] for epoch in loop.epochs}
    first = [one for one in loop.passes if one.mark is not None and one.batch is not None and one.batch[1] == 1]
    batches = {one.batch: one.mark for one in first}
    if len(set(batches.values())) < len(batches):
        return {}
    return {one.mark: begun.get(one.batch[:2], one.spot) for one in first if one.mark and one.batch}


def _sampler(epoch: Event, world: int) -> Iterator[Finding]:
    rows, dealt, batch = (epoch.get(name) for name in ("dataset", "dealt", "batch_size"))
    spot: Spot = epoch["spot"]
    if not isinstance(rows, int):
        return
    if epoch.get("is_plain"):
        text = (
            f"Each of {world} ranks reads all {rows:,} rows: every row counts {world} times in an epoch, and {world} ranks "
            "do the work of one."
        )
        yield finding_at(spot, "rows-repeated", "error", text, {"rows": rows, "world": world})
        return
    if epoch.get("is_even") and isinstance(batch, int):
        dealt = math.ceil(rows / (batch * world)) * batch * world
    if not isinstance(dealt, int) or dealt == rows:
        return
    facts = {"rows": rows, "dealt": dealt, "world": world}
    if dealt > rows:
        kind, what = "rows-repeated", f"count twice in an epoch, because {rows:,} rows cannot be dealt evenly"
    else:
        kind, what = (
            "tail-dropped",
            "are dealt to no rank in an epoch, because the sampler drops what cannot be dealt evenly",
        )
    text = f"{abs(dealt - rows):,} of {rows:,} rows {what} to {world} ranks."
    yield replace(finding_at(spot, "rows-repeated", "warning", text, facts), kind=kind)


def _same_rows_again(runs: list[OptimizerRun]) -> Iterator[Finding]:
    for run in runs:
        for update in run.updates:
            parts = update.micro_batches
            if len(parts) < 2 or any(len(passes) != 1 for passes in parts):
                continue
            gradients = [_unweighted(passes[0]) for passes in parts]
            twice = len(gradients) - len(set(gradients))
            if all(gradients) and twice and any(gradients[0]):
                text = (
                    f"{twice + 1} micro-batches of update {update.number} brought the very same gradient: the same rows "
                    f"were run again instead of new ones."
                )
                spot = _restarted(run.loop, [passes[0] for passes in parts]) or update.first_spot
                yield run.finding("rows-repeated", "error", spot, text, {"update": update.number, "same": twice + 1})
                return


def _restarted(loop: WatchedLoop, passes: list[LossPass]) -> Spot | None:
    """Return the line that restarts the loader for every micro-batch: `next(iter(loader))`."""
    batches = [one.batch for one in passes if one.batch is not None and one.batch[2] == 0]
    if len(set(batches)) != len(passes):
        return None
    return next((epoch["spot"] for epoch in loop.epochs if epoch["loader"] == batches[0][0]), None)


def _unweighted(one: LossPass) -> tuple[float, ...]:
    """Return the probed gradient of the loss before its weight, rounded; empty if it is zero."""
    weight = one.terms[0].weight if one.terms else 1.0
    flat = [value for key in sorted(one.probe) for value in one.probe[key]]
    return tuple(float(f"{value / weight:.5g}") for value in flat) if weight and any(flat) else ()
