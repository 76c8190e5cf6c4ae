"""Clipping, schedules and loss scalers: what stands where it should not."""

import math
from collections import defaultdict
from collections.abc import Iterator

from anybatch.doctor.finding import Finding, Severity
from anybatch.doctor.loop_case import LoopCase, plural
from anybatch.doctor.loops import Happening, LoopUpdate


def order_rules(case: LoopCase) -> Iterator[Finding]:
    """Per optimizer."""
    yield from _clipping(case)
    yield from _scaling(case)
    yield from _schedules(case)


def _inside(update: LoopUpdate, one: Happening) -> bool:
    """Between two micro-batches of the update."""
    return len(update.passes) > 1 and update.passes[0].index < one.index < update.passes[-1].index


def _between_lanes(case: LoopCase, place: int, one: Happening) -> bool:
    lanes = case.lanes[place]
    return len(lanes) > 1 and lanes[0][-1].index < one.index < lanes[-1][0].index


def _clipping(case: LoopCase) -> Iterator[Finding]:
    clips = case.clips()
    for place, update in enumerate(case.updates):
        for clip in clips:
            if _between_lanes(case, place, clip) and not case.is_by_hand:
                text = (
                    f"Gradients are clipped to {clip.facts['limit']:g} between the micro-batches of update {update.number}: "
                    f"what is clipped is a part of the sum, and each micro-batch is cut by another factor."
                )
                yield case.finding(
                    "clip-early",
                    "error",
                    clip.spot,
                    text,
                    {"limit": clip.facts["limit"], "norm": clip.facts.get("norm")},
                )
        yield from _clip_scaled(case, update, clips)
    yield from _clip_late(case, clips)


def _clip_scaled(case: LoopCase, update: LoopUpdate, clips: list[Happening]) -> Iterator[Finding]:
    scales = [one.scale for one in update.passes if one.scale not in (None, 1.0)]
    if not scales:
        return
    unscaled = [
        h.index for h in update.happenings if h.kind == "unscale" and h.facts.get("optimizer") == case.optimizer
    ]
    for clip in clips:
        if update.passes[0].index < clip.index < update.index and not any(i < clip.index for i in unscaled):
            text = (
                f"Gradients are clipped to {clip.facts['limit']:g} while they are still multiplied with the loss scale "
                f"{scales[-1]:g}: the limit on the real gradient is {clip.facts['limit'] / scales[-1]:.3g}."
            )
            yield case.finding(
                "clip-scaled", "error", clip.spot, text, {"scale": scales[-1], "norm": clip.facts.get("norm")}
            )


def _clip_late(case: LoopCase, clips: list[Happening]) -> Iterator[Finding]:
    """After a step, before anything new came."""
    touching = sorted(one.index for one in case.loop.passes if one.touched & case.numbers)
    steps = [update.index for update in case.loop.updates_of(case.optimizer)]
    late = []
    for clip in clips:
        step = max((index for index in steps if index < clip.index), default=None)
        if step is not None and not any(step < index < clip.index for index in touching):
            late.append(clip)
    if late and 2 * len(late) >= len(steps) - 1:
        text = (
            f"Gradients are clipped to {late[0].facts['limit']:g} after the step that they were meant for: no update "
            "is clipped."
        )
        yield case.finding("clip-after-step", "error", late[0].spot, text, {"clips": len(late), "steps": len(steps)})


def _scaling(case: LoopCase) -> Iterator[Finding]:
    for place, update in enumerate(case.updates):
        scales = [one.scale for one in update.passes]
        if all(scale is None for scale in scales):
            continue
        for one in update.happenings:
            if one.kind == "scaler-update" and _between_lanes(case, place, one):
                text = (
                    f"scaler.update() runs between the micro-batches of update {update.number}: parts of one sum may "
                    "have different scales."
                )
                yield case.finding("scaler-misuse", "error", one.spot, text, {"scale": one.facts.get("scale")})
            if (
                one.kind == "unscale"
                and _between_lanes(case, place, one)
                and one.facts.get("optimizer") == case.optimizer
            ):
                text = (
                    f"scaler.unscale_() runs between the micro-batches of update {update.number}: what comes after is added "
                    f"with the scale {scales[-1]:g} to gradients without it."
                )
                yield case.finding("scaler-misuse", "error", one.spot, text, {"scale": scales[-1]})
        if len(set(scales)) > 1:
            text = f"The micro-batches of update {update.number} have different loss scales: {', '.join(map(str, scales[:6]))}."
            yield case.finding("scaler-misuse", "error", update.passes[-1].spot, text, {"scales": scales[:8]})
        unscaled = any(one.kind == "unscale" for one in update.happenings)
        if not update.is_in_scaler and not unscaled and scales[-1] not in (None, 1.0):
            text = (
                f"The optimizer steps on gradients that are multiplied with the loss scale {scales[-1]:g}: it was not "
                "stepped by scaler.step()."
            )
            yield case.finding("scaler-misuse", "error", update.spot, text, {"scale": scales[-1]})


def _schedules(case: LoopCase) -> Iterator[Finding]:
    groups: dict[int, list[Happening]] = defaultdict(list)
    for one in case.loop.happenings:
        if one.kind == "schedule" and one.facts.get("optimizer") == case.optimizer:
            groups[int(one.facts.get("scheduler", 0))].append(one)
    for steps in groups.values():
        yield from _schedule(case, steps)


def _schedule(case: LoopCase, steps: list[Happening]) -> Iterator[Finding]:
    several = [place for place, lanes in enumerate(case.lanes) if len(lanes) > 1]
    within = [place for place in several if any(_between_lanes(case, place, one) for one in steps)]
    per_update = len(steps) / max(1, len(case.updates))
    facts = {"schedule_steps": len(steps), "updates": len(case.updates), "micro_batches_per_update": case.size}
    if several and 2 * len(within) > len(several):
        text = (
            f"The schedule is stepped in every micro-batch: {len(steps)} times in {plural(len(case.updates), 'update')}, "
            f"so it runs {max(per_update, 2):.0f} times as fast as the updates."
        )
        yield case.finding("schedule-per-micro-batch", "error", steps[0].spot, text, facts)
        return
    early = [
        update
        for update in case.updates
        if update.passes and any(update.passes[-1].index < one.index < update.index for one in steps)
    ]
    first = case.updates[0].index if case.updates else -1
    ahead = sum(one.index < first for one in steps)
    is_before_first = ahead == 1 and len(steps) > 1 and not case.loop.others.get("skipped")
    if case.updates and (2 * len(early) > len(case.updates) or is_before_first):
        text = (
            "The schedule is stepped before the optimizer: the first learning rate is never used, and every later "
            "one an update early."
        )
        yield case.finding("schedule-before-step", "error", steps[0].spot, text, facts)
    if per_update > 1.5 and len(case.updates) > 2:
        text = (
            f"The schedule is stepped {per_update:.3g} times per update ({len(steps)} times in {len(case.updates)}): it ends "
            f"after {100 / per_update:.0f} % of the updates that it was made for."
        )
        yield case.finding("schedule-horizon", "warning", steps[0].spot, text, facts)
        return
    yield from _horizon(case, steps, per_update)


def _horizon(case: LoopCase, steps: list[Happening], per_update: float) -> Iterator[Finding]:
    horizon = steps[0].facts.get("horizon")
    if not isinstance(horizon, int) or case.size < 2 or not 0.7 < per_update < 1.4:
        return
    whole = _epoch_lengths(case)
    epochs = set(case.loop.intended_epochs.values())
    pairs = [(length, count) for length in {*whole, *case.loop.lengths.values()} for count in epochs]
    seen = [
        math.ceil(length / case.size) * count
        for length, count in pairs
        if abs(length * count - horizon) <= 0.02 * horizon
    ]
    if len(steps) > max([1.1 * math.ceil(horizon / case.size), *seen]):
        return  # it has gone further than it would if it were made for micro-batches
    finished = case.loop.reason == "finished" and abs(horizon / len(steps) / case.size - 1) < 0.25
    multiple = next(
        (length for length in whole if length > case.size and horizon % length == 0 and horizon // length <= 200), None
    )
    if not seen and not finished and multiple is None:
        return
    gets = len(steps) if finished else math.ceil(horizon / case.size)
    left = _rate_left(str(steps[0].facts.get("kind")), str(steps[0].facts.get("by")), gets / horizon)
    severity: Severity = "error" if seen or finished else "warning"
    text = (
        f"The schedule was made for {horizon:,} steps and gets {gets:,}, one per update of {case.size} micro-batches: "
        f"it will end at {100 * gets / horizon:.0f} % of its course{left}."
    )
    facts = {"horizon": horizon, "steps": gets, "micro_batches_per_update": case.size}
    yield case.finding("schedule-horizon", severity, steps[0].spot, text, facts)


def _epoch_lengths(case: LoopCase) -> set[int]:
    used = {one.batch[0] for update in case.updates for one in update.passes if one.batch is not None}
    begun = [line for line in case.loop.epochs if line["event"] == "epoch" and line["loader"] in used]
    ended = [line for line in case.loop.epochs if line["event"] == "epoch-end" and line["loader"] in used]
    lengths = {int(line["whole"]) for line in begun if line.get("whole")} | {int(line["fetched"]) for line in ended}
    return lengths - {0}


def _rate_left(kind: str, by: str, part: float) -> str:
    if kind == "CosineAnnealingLR" or "cosine" in by:
        return f", at {50 * (1 + math.cos(math.pi * part)):.0f} % of its learning rate instead of the lowest"
    if "linear" in by:
        return f", at {100 * (1 - part):.0f} % of its learning rate"
    return ""
