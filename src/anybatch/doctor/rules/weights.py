"""Rules on weights: the division of a loss, unequal micro-batches, lost passes and tails, and the logged loss."""

import re
from collections import Counter
from collections.abc import Iterator

from anybatch.display import plural
from anybatch.doctor.finding import Finding, Severity
from anybatch.doctor.log import Event
from anybatch.doctor.loops import OptimizerRun, WatchedLoop
from anybatch.doctor.updates import LoopUpdate, LostPass, Weighing, gradient_error, near


def weight_rules(run: OptimizerRun) -> Iterator[Finding]:
    """Apply the rules on divisions, unequal micro-batches, old gradients and odd sizes of updates."""
    if run.is_by_hand:
        return
    if run.size == 1:
        yield from _stepped_every(run)
    first = run.updates[0] if run.is_off_by_one else None
    for update, weighing in run.weighed:
        # stale, partly cleared and off-by-one updates have findings of their own
        is_explained = update.stale or update.number in run.partly_cleared or update is first
        if max(run.size, len(weighing.shares)) > 1 and not weighing.is_plain_sum and not is_explained:
            yield from _division(run, update, weighing)
    yield from _uneven(run)
    yield from _stale(run)
    yield from _sizes(run)


def _measured(update: LoopUpdate, weighing: Weighing) -> tuple[str, dict[str, object]]:
    error = gradient_error(update, weighing)
    facts: dict[str, object] = {
        "update": update.number,
        "micro_batches": len(weighing.shares),
        "weights": [round(share, 6) for share in weighing.shares],
        "sum_of_weights": round(weighing.total, 6),
        "terms": list(weighing.counts),
    }
    if error is None:
        return "", facts
    return f" The gradient is {100 * error:.3g} % off what one batch would give (measured).", {**facts, "error": error}


def _division(run: OptimizerRun, update: LoopUpdate, weighing: Weighing) -> Iterator[Finding]:
    n, total = len(weighing.shares), weighing.total
    if near(total, 1.0) or not total:
        return
    measured, facts = _measured(update, weighing)
    spot, share, is_constant = update.first_spot, weighing.shares[0], weighing.is_constant
    start = f"The weights of update {update.number} add up to {total:.2f} over {plural(n, 'micro-batch')}"
    # with several losses a factor may be intended, unless their sum is off too
    is_surely_twice = weighing.num_terms == 1 or (n in run.loop.intended.values() and not near(weighing.all_terms, 1.0))
    if is_constant and near(share, 1.0):
        text = f"{start}: the loss is not divided, so the step is {n} times as large as that of one batch.{measured}"
        yield run.finding("not-divided", "error", spot, text, facts)
    elif is_constant and n > 1 and near(total, 1.0 / n) and is_surely_twice:
        text = f"{start}: the loss is divided by {n} twice, so the step is {n} times too small.{measured}"
        yield run.finding("divided-twice", "error", spot, text, facts)
    elif n < run.size and is_constant and near(share, 1.0 / run.size) and run.is_usually_whole:
        text = f"{start}: it has {n}, and each loss is divided by {run.size}. A short update counts for too little.{measured}"
        yield run.tail_finding("other-divisor", spot, text, facts)
    elif n == run.size:
        divisor = 1.0 / share if share else 0.0
        whole = round(divisor)
        is_whole = whole >= 2 and abs(divisor - whole) < 0.01 * divisor
        is_likely = near(total, 1.0 / n**2) or whole > 2 * n or n in (whole - 1, whole + 1)
        if is_whole and (is_likely or run.loop.intended) and weighing.num_terms == 1:
            text = f"{start}: each loss is divided by {whole}, and there are {n} of them.{measured}"
            yield run.finding("other-divisor", "error", spot, text, facts)
            return
        text = (
            f"{start}. If your loss has a factor of its own, such as 0.5 * loss, this is right; "
            f"if not, the division is not by {n}. It cannot be told from outside."
        )
        yield run.finding("other-divisor", "note", spot, text, facts)


def _stepped_every(run: OptimizerRun) -> Iterator[Finding]:
    meant = {value: name for name, value in run.loop.intended.items() if value > 1}
    if not run.weighed or not meant or len(run.updates) < 2:
        return
    if sum(not one.is_left for one in run.loop.lost) >= len(run.updates):
        return  # passes were cleared, which is a finding of its own
    update, weighing = run.weighed[-1]
    divisor = round(1.0 / weighing.total) if weighing.total else 0
    spot = update.spot
    facts = {"update": update.number, "weight": weighing.total, "intended": dict(run.loop.intended)}
    if divisor in meant and near(weighing.total, 1.0 / divisor):
        text = (
            f"Every update is made of one micro-batch, and its loss is divided by {divisor}: the optimizer steps in every "
            f"micro-batch, with 1/{divisor} of the gradient, instead of once per {divisor}."
        )
        yield run.finding("stepped-every-micro-batch", "error", spot, text, facts)
    elif near(weighing.total, 1.0):
        value, name = next(iter(meant.items()))
        text = f"`{name}` is {value}, and every update is made of one micro-batch: the optimizer steps in every micro-batch."
        yield run.finding("stepped-every-micro-batch", "warning", spot, text, facts)


def _uneven(run: OptimizerRun) -> Iterator[Finding]:
    several = [(u, w) for u, w in run.weighed if len(w.shares) > 1 and not u.stale]
    uneven = [(u, w) for u, w in several if w.is_constant and not w.is_equal_by_term]
    if not uneven:
        return
    update, weighing = max(uneven, key=lambda one: gradient_error(*one) or 0.0)
    measured, facts = _measured(update, weighing)
    counts = ", ".join(f"{count:,.4g}" for count in weighing.counts[:8])
    ratio = max(weighing.per_term) / max(min(weighing.per_term), 1e-30)
    text = (
        f"The micro-batches of update {update.number} have {counts} terms, and each counts for the same "
        f"{weighing.shares[0]:.3g}: a term of the smallest weighs {ratio:.3g} times one of the largest. This is a mean of "
        f"means.{measured}"
    )
    severity: Severity = "error" if 2 * len(uneven) > len(several) else "warning"
    yield run.finding("uneven-micro-batches", severity, update.first_spot, text, facts)


def lost_rules(loop: WatchedLoop, runs: list[OptimizerRun]) -> Iterator[Finding]:
    """Apply the rules on passes that no optimizer used."""
    if not loop.updates or any(run.is_by_hand for run in runs):
        return
    run = max(runs, key=lambda one: len(one.updates))
    used = Counter(one.spot.chain for update in loop.updates for one in update.passes)
    has_passes = any(update.passes for update in loop.updates)
    lost = [one for one in loop.lost if used[one.loss_pass.spot.chain] or not has_passes]
    left = [one for one in lost if one.is_left]
    tails = [one for one in lost if not one.is_left and _is_tail(one, loop, run)]
    early = [one for one in lost if not one.is_left and one not in tails]
    if early:
        yield _cleared(run, early)
    elif tails:
        yield _dropped(run, tails)
    elif left and loop.reason == "finished":  # else the last tail has the same cause as the others
        text = (
            f"{_rows(left)} never reached a step: {plural(len(left), 'micro-batch')} left in the gradients when the "
            "script ended."
        )
        spot = run.updates[-1].spot if run.updates else left[0].spot
        yield run.tail_finding("left-at-end", spot, text, {"micro_batches": len(left), "of": len(loop.passes)})


def _cleared(run: OptimizerRun, lost: list[LostPass]) -> Finding:
    total = len(run.loop.passes)
    spot = Counter(one.spot for one in lost).most_common(1)[0][0]
    text = (
        f"{len(lost)} of {total} micro-batches were cleared before any step used them: gradients are zeroed between "
        f"backward and step, so an update learns from {max(1, run.size) if run.updates else 0} "
        f"micro-batch{'' if run.size == 1 else 'es'} only."
    )
    return run.finding("cleared-before-use", "error", spot, text, {"lost": len(lost), "of": total})


def _dropped(run: OptimizerRun, lost: list[LostPass]) -> Finding:
    spot = run.updates[0].spot if run.updates else lost[0].spot
    epochs = len({one.loss_pass.batch[:2] for one in lost if one.loss_pass.batch is not None}) or 1
    opening, facts = _in_a_whole_epoch(run, lost[0])
    text = (
        f"{opening or f'{_rows(lost)} never reached a step: an epoch'} ends with "
        f"{plural(facts.get('micro_batches', max(1, len(lost) // epochs)), 'micro-batch')} that no full update of "
        f"{max(run.size, 2)} takes, cleared when the next epoch begins."
    )
    evidence = {"lost": len(lost), "epochs": epochs, "cleared_at": lost[0].spot.line, **facts}
    return run.tail_finding("tail-dropped", spot, text, evidence)


def _in_a_whole_epoch(run: OptimizerRun, lost: LostPass) -> tuple[str, dict[str, int]]:
    """Compute the rows that a whole epoch loses, from the sizes that its loader reports; empty if it does not."""
    batch = lost.loss_pass.batch
    begun = [epoch for epoch in run.loop.epochs if batch and epoch["loader"] == batch[0]]
    rows, size, whole = (int((begun or [{}])[0].get(name) or 0) for name in ("dataset", "batch_size", "whole"))
    rest = whole % run.size if run.size > 1 else 0
    missed = rows - (whole - rest) * size
    if not size or not rest or not 0 < missed <= rest * size:
        return "", {}
    opening = f"{missed:,} of {rows:,} rows never reach a step: an epoch of {whole:,} micro-batches"
    return opening, {"rows": missed, "of_rows": rows, "micro_batches": rest}


def _rows(lost: list[LostPass]) -> str:
    rows = sum(one.loss_pass.rows or 0 for one in lost)
    return f"{rows:,} rows" if rows else plural(len(lost), "micro-batch")


def _is_tail(one: LostPass, loop: WatchedLoop, run: OptimizerRun) -> bool:
    """Return True if it was cleared after its epoch had ended, and no later pass of that epoch was used."""
    batch = one.loss_pass.batch
    if batch is None or batch[0] < 0:
        clearings = Counter(h.spot.chain for h in loop.actions if h.kind == "cleared")
        usual = clearings.most_common(1)[0][0] if clearings else ""
        return run.size > 1 and one.spot.chain != usual
    ended = [e["index"] for e in loop.epoch_ends if (e["loader"], e["number"]) == batch[:2]]
    begun = [e["index"] for e in loop.epochs if e["loader"] == batch[0] and e["number"] > batch[1]]
    after = min([*ended, *begun], default=None)
    if after is None or one.index < after:
        return False
    later = [p for u in loop.updates for p in u.passes if p.batch is not None and p.batch[:2] == batch[:2]]
    return run.size > 1 and all(p.serial < one.loss_pass.serial for p in later)


def _stale(run: OptimizerRun) -> Iterator[Finding]:
    """Find steps that use old gradients again."""
    again = [update for update in run.updates if update.stale]
    if len(run.updates) < 3 or 2 * len(again) < len(run.updates) - 1:
        return
    cleared = [h for u in run.updates for h in u.actions if h.kind == "cleared" and h.parameters & run.parameters]
    last = again[-1]
    facts = {"update": last.number, "old_micro_batches": len(last.stale), "new_micro_batches": len(last.passes)}
    if not cleared:
        text = (
            f"Gradients are never cleared: update {last.number} steps on {plural(len(last.stale), 'micro-batch')} that were "
            f"stepped on before, besides {len(last.passes)} new."
        )
        yield run.finding("never-cleared", "error", last.spot, text, facts)
        return
    per = len(run.updates) / max(1, len({h.index for h in cleared}))
    text = (
        f"The optimizer steps about {per:.0f} times per clearing: update {last.number} steps again on "
        f"{plural(len(last.stale), 'micro-batch')} that it has stepped on already."
    )
    yield run.finding("stepped-every-micro-batch", "error", last.spot, text, facts)


def _sizes(run: OptimizerRun) -> Iterator[Finding]:
    """Find updates of another size than the rest."""
    if run.size < 2 or len(run.updates) < 3 or any(update.stale for update in run.updates):
        return
    sizes = [len(update.micro_batches) for update in run.updates]
    if run.is_off_by_one:
        weighing = run.updates[0].weighing
        counts = "" if weighing is None else f", and its weights add up to {weighing.total:.2f}"
        text = (
            f"The first update is made of {plural(sizes[0], 'micro-batch')}, the others of {run.size}{counts}: "
            f"the count that decides when to step is off by one."
        )
        yield run.finding("off-by-one", "error", run.updates[0].spot, text, {"sizes": sizes[:8]})
    for update, size in list(zip(run.updates, sizes, strict=True))[1:]:
        is_carried = update.spans_epochs or (size > run.size and update.passes[0].batch is None)
        if size != run.size and is_carried and not update.is_whole:
            text = (
                f"Update {update.number} is made of {size} micro-batches instead of {run.size}: what was left of one epoch "
                f"lies in the gradients when the next begins."
            )
            facts = {"update": update.number, "sizes": sizes[:12]}
            yield run.tail_finding("tail-leaks", update.spot, text, facts)
            return


def logging_rules(run: OptimizerRun) -> Iterator[Finding]:
    """Find reads of a loss that was divided for backward and is not multiplied again."""
    n = run.size
    divided = [w for _, w in run.weighed if w.kind == "mean" and w.num_terms == 1 and w.ratio == 1.0]
    if n < 2 or not any(len(w.shares) == n and all(near(share, 1 / n) for share in w.shares) for w in divided):
        return
    for event in run.loop.events["read"]:
        if not _is_undone(event):
            text = (
                f"The loss that is read here was divided by {n} for backward: what is logged is 1/{n} of the loss of a "
                "micro-batch."
            )
            yield run.finding("loss-logged-divided", "warning", event["spot"], text, {"divided_by": n})


def _is_undone(event: Event) -> bool:
    """Return True if the number is multiplied again, or added up: n parts of a mean are the mean, unless divided again."""
    text, name = str(event.get("text", "")), str(event.get("variable", ""))
    uses = [str(use) for use in event.get("uses", ())]
    if any("*" in line for line in [text, *uses]):
        return True
    if not name or "+=" not in text:
        return False
    word = re.escape(name)
    resets = sum(bool(re.match(rf"{word}\s*=\s*0", use)) for use in uses)
    return resets > 1 or not any(re.search(rf"(?<![\w.]){word}\s*/[^/]", use) for use in uses)
