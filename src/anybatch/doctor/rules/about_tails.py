"""Whether every micro-batch is used exactly once: what is cleared, left, carried over, stepped on again."""

from collections import Counter
from collections.abc import Iterator

from anybatch.doctor.finding import Finding, Severity
from anybatch.doctor.loop_case import LoopCase, plural, spans
from anybatch.doctor.loops import Lost, WatchedLoop


def tail_rules(case: LoopCase) -> Iterator[Finding]:
    """Per optimizer."""
    if case.is_by_hand:
        return
    yield from _stale(case)
    yield from _sizes(case)


def lost_rules(loop: WatchedLoop, cases: list[LoopCase]) -> Iterator[Finding]:
    """Passes that no optimizer used, of the whole loop."""
    if not loop.updates or any(case.is_by_hand for case in cases):
        return
    case = max(cases, key=lambda one: len(one.updates))
    used = Counter(one.spot.chain for update in loop.updates for one in update.passes)
    has_passes = any(update.passes for update in loop.updates)
    lost = [one for one in loop.lost if used[one.loss_pass.spot.chain] or not has_passes]
    early = [one for one in lost if not one.is_left and not _is_tail(one, loop, case)]
    tails = [one for one in lost if not one.is_left and _is_tail(one, loop, case)]
    total = len(loop.passes)
    if early:
        yield _cleared(case, early, total)
    elif tails:
        yield _dropped(case, tails)
    left = [one for one in lost if one.is_left]
    if left and loop.reason == "finished" and not early and not tails:  # the last tail has the same cause as the others
        told = (
            f"{_rows(left)} never reached a step: {plural(len(left), 'micro-batch')} left in the gradients when the "
            "script ended."
        )
        spot = case.updates[-1].spot if case.updates else left[0].spot
        only = case.without_tail
        severity: Severity = "warning" if only else "error"
        yield case.finding("left-at-end", severity, spot, told + only, {"micro_batches": len(left), "of": total})


def _cleared(case: LoopCase, lost: list[Lost], total: int) -> Finding:
    spot = Counter(one.spot for one in lost).most_common(1)[0][0]
    text = (
        f"{len(lost)} of {total} micro-batches were cleared before any step used them: gradients are zeroed between "
        f"backward and step, so an update learns from {max(1, case.size) if case.updates else 0} "
        f"micro-batch{'' if case.size == 1 else 'es'} only."
    )
    return case.finding("cleared-before-use", "error", spot, text, {"lost": len(lost), "of": total})


def _dropped(case: LoopCase, lost: list[Lost]) -> Finding:
    spot = case.updates[0].spot if case.updates else lost[0].spot
    epochs = len({one.loss_pass.batch[:2] for one in lost if one.loss_pass.batch is not None}) or 1
    told, facts = _in_a_whole_epoch(case, lost[0])
    text = (
        f"{told or f'{_rows(lost)} never reached a step: an epoch'} ends with "
        f"{plural(facts.get('micro_batches', max(1, len(lost) // epochs)), 'micro-batch')} that no full update of "
        f"{max(case.size, 2)} takes, cleared when the next epoch begins."
    )
    only = case.without_tail
    return case.finding(
        "tail-dropped",
        "warning" if only else "error",
        spot,
        text + only,
        {"lost": len(lost), "epochs": epochs, "cleared_at": lost[0].spot.line, **facts},
    )


def _in_a_whole_epoch(case: LoopCase, lost: Lost) -> tuple[str, dict[str, int]]:
    """What an epoch that was not cut short would lose, from what its loader says; nothing where it does not say."""
    batch = lost.loss_pass.batch
    begun = [line for line in case.loop.epochs if line["event"] == "epoch" and batch and line["loader"] == batch[0]]
    rows, size, whole = (int((begun or [{}])[0].get(name) or 0) for name in ("dataset", "batch_size", "whole"))
    rest = whole % case.size if case.size > 1 else 0
    missed = rows - (whole - rest) * size
    if not size or not rest or not 0 < missed <= rest * size:
        return "", {}
    told = f"{missed:,} of {rows:,} rows never reach a step: an epoch of {whole:,} micro-batches"
    return told, {"rows": missed, "of_rows": rows, "micro_batches": rest}


def _rows(lost: list[Lost]) -> str:
    rows = sum(one.loss_pass.rows or 0 for one in lost)
    return f"{rows:,} rows" if rows else plural(len(lost), "micro-batch")


def _is_tail(one: Lost, loop: WatchedLoop, case: LoopCase) -> bool:
    """Cleared after its epoch had ended, and nothing of that epoch after it was used."""
    batch = one.loss_pass.batch
    if batch is None or batch[0] < 0:
        clearings = Counter(h.spot.chain for h in loop.happenings if h.kind == "cleared")
        usual = clearings.most_common(1)[0][0] if clearings else ""
        return case.size > 1 and one.spot.chain != usual
    ended = [e["index"] for e in loop.epochs if e["event"] == "epoch-end" and (e["loader"], e["number"]) == batch[:2]]
    begun = [
        e["index"] for e in loop.epochs if e["event"] == "epoch" and e["loader"] == batch[0] and e["number"] > batch[1]
    ]
    after = min([*ended, *begun], default=None)
    if after is None or one.index < after:
        return False
    later = [p for u in loop.updates for p in u.passes if p.batch is not None and p.batch[:2] == batch[:2]]
    return case.size > 1 and all(p.serial < one.loss_pass.serial for p in later)


def _stale(case: LoopCase) -> Iterator[Finding]:
    """Steps on gradients that were stepped on before."""
    again = [update for update in case.updates if update.stale]
    if len(case.updates) < 3 or 2 * len(again) < len(case.updates) - 1:
        return
    cleared = [h for u in case.updates for h in u.happenings if h.kind == "cleared" and h.parameters & case.numbers]
    last = again[-1]
    facts = {"update": last.number, "old_micro_batches": len(last.stale), "new_micro_batches": len(last.passes)}
    if not cleared:
        text = (
            f"Gradients are never cleared: update {last.number} steps on {plural(len(last.stale), 'micro-batch')} that were "
            f"stepped on before, besides {len(last.passes)} new."
        )
        yield case.finding("never-cleared", "error", last.spot, text, facts)
        return
    per = len(case.updates) / max(1, len({h.index for h in cleared}))
    text = (
        f"The optimizer steps about {per:.0f} times per clearing: update {last.number} steps again on "
        f"{plural(len(last.stale), 'micro-batch')} that it has stepped on already."
    )
    yield case.finding("stepped-every-micro-batch", "error", last.spot, text, facts)


def _sizes(case: LoopCase) -> Iterator[Finding]:
    """Updates of another size than the rest."""
    if case.size < 2 or len(case.updates) < 3 or any(update.stale for update in case.updates):
        return
    sizes = [len(lanes) for lanes in case.lanes]
    if case.is_off_by_one:
        weighing = case.weighings[0]
        counts = "" if weighing is None else f", and its weights add up to {weighing.total:.2f}"
        text = (
            f"The first update is made of {plural(sizes[0], 'micro-batch')}, the others of {case.size}{counts}: "
            f"the count that decides when to step is off by one."
        )
        yield case.finding("off-by-one", "error", case.updates[0].spot, text, {"sizes": sizes[:8]})
    for place, (update, size) in list(enumerate(zip(case.updates, sizes, strict=True)))[1:]:
        is_carried = spans(update.passes) or (size > case.size and update.passes[0].batch is None)
        if size != case.size and is_carried and not case.is_whole(place):
            text = (
                f"Update {update.number} is made of {size} micro-batches instead of {case.size}: what was left of one epoch "
                f"lies in the gradients when the next begins."
            )
            facts = {"update": update.number, "sizes": sizes[:12]}
            only = case.without_tail
            yield case.finding("tail-leaks", "warning" if only else "error", update.spot, text + only, facts)
            return
