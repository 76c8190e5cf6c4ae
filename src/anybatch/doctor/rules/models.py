"""Rules on the model and its numbers: BatchNorm, negatives, precision, kept graphs, and notes on unreadable losses."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from anybatch.display import plural
from anybatch.doctor.finding import Finding, Severity, finding_at
from anybatch.doctor.log import Event
from anybatch.doctor.loops import OptimizerRun, WatchedLoop
from anybatch.doctor.updates import LoopUpdate, LossPass

LOW = ("bfloat16", "float16")
LARGEST_SUM_ERROR = 5e-3
"""Relative error of a 16-bit sum above which it is an error, not a warning."""


def model_rules(run: OptimizerRun) -> Iterator[Finding]:
    """Apply the rules on one optimizer."""
    accumulated = [update for update in run.updates if len(update.micro_batches) > 1]
    if accumulated:
        update = accumulated[-1]
        yield from _batch_norm(run, update, [passes[0] for passes in update.micro_batches])
        yield from _negatives(run, update)
        yield from _low_precision(run, max(accumulated, key=lambda one: len(one.passes)))
        yield from _learning_rate(run, update)
    yield from _unreadable(run)


def loop_rules(loop: WatchedLoop, runs: list[OptimizerRun]) -> Iterator[Finding]:
    """Apply the rules on the whole loop."""
    for event in loop.events["kept"]:
        name = event.get("variable")
        who = f"`{name}` keeps" if name else "something keeps"
        text = (
            f"{who} the graphs of earlier losses alive: {event.get('alive')} of them by now, and each is memory that is "
            "never freed."
        )
        yield _of_event(event, "kept-graph", "warning", text)
    for event in loop.events["unowned"]:
        shapes = "; ".join("x".join(map(str, shape)) or "1" for shape in event.get("shapes", [])[:4])
        text = (
            f"{plural(int(event.get('count', 1)), 'parameter')} of the loss ({shapes}) are in no optimizer: they get "
            "gradients and never change."
        )
        yield _of_event(event, "unowned-parameters", "warning", text)
    for event in loop.events["trouble"]:
        where = f"(in {event.get('within')}, line {event.get('line')})"
        text = f"The recorder failed and stopped watching: {event.get('error')} {where}."
        yield _of_event(event, "recorder-trouble", "note", text)
    yield from _eval(loop)
    yield from _windows(runs)


def _of_event(event: Event, kind: str, severity: Severity, text: str) -> Finding:
    facts: Event = {key: event[key] for key in ("alive", "variable", "count", "shapes", "error") if key in event}
    return finding_at(event["spot"], kind, severity, text, facts)


def _batch_norm(run: OptimizerRun, update: LoopUpdate, passes: Sequence[LossPass]) -> Iterator[Finding]:
    if not all(one.norm_forwards for one in passes):
        return
    n = len(passes)
    norms: list[Mapping[str, Any]] = [one.norms for one in passes if one.norms]
    momentum = norms[0].get("momentum") if norms else None
    text = f"BatchNorm takes its statistics from each of {n} micro-batches, not from the batch"
    facts: dict[str, object] = {"micro_batches": n}
    if len(norms) == n:
        error = _variance_error(norms)
        facts["variance_error"] = error
        text += (
            f": variances of update {update.number} are {100 * error:.2g} % off those of the whole batch (measured at "
            "the first layer)"
        )
    if isinstance(momentum, float):
        effective = 1 - (1 - momentum) ** n
        facts["momentum"] = effective
        text += f"; running statistics move by {effective:.3g} per update instead of {momentum:g}"
    yield run.finding("batch-norm", "warning", passes[0].spot, text + ".", facts)


def _variance_error(norms: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean over channels of the micro-batches' mean relative deviation from the pooled variance."""
    counts = [norm["count"] for norm in norms]
    total = sum(counts)
    errors = []
    for channel in range(len(norms[0]["mean"])):
        means = [norm["mean"][channel] for norm in norms]
        variances = [norm["var"][channel] for norm in norms]
        mean = sum(m * c for m, c in zip(means, counts, strict=True)) / total
        pooled = sum((v + (m - mean) ** 2) * c for v, m, c in zip(variances, means, counts, strict=True)) / total
        off = [abs(variance - pooled) / pooled for variance in variances] if pooled else [0.0]
        errors.append(sum(off) / len(off))
    return sum(errors) / len(errors) if errors else 0.0


def _negatives(run: OptimizerRun, update: LoopUpdate) -> Iterator[Finding]:
    n, chain = len(update.micro_batches), update.first_spot.chain
    pairs = [max((term.pairs for term in one.terms), default=0) for one in update.passes]
    same_line = [one for one in run.loop.passes if one.spot.chain == chain]
    is_contrastive = all(pairs) and all(any(term.pairs for term in one.terms) for one in same_line)
    if not is_contrastive or len(run.loop.passes) < 3:
        return
    rows = sum(pairs)
    text = (
        f"A contrastive loss over {pairs[0]} rows is accumulated {n} times: every row is compared with {pairs[0] - 1} others "
        f"instead of {rows - 1}, so this is another loss, not that of {rows} rows."
    )
    yield run.finding("negatives-missing", "error", update.passes[0].spot, text, {"rows": pairs[0], "batch": rows})


def _low_precision(run: OptimizerRun, update: LoopUpdate) -> Iterator[Finding]:
    dtype = next((dtype for one in update.passes for dtype in one.dtypes if dtype in LOW), None)
    if dtype is None:
        return
    n, error = len(update.passes), _sum_error(update)
    measured = "" if error is None else f": the sum is {100 * error:.2g} % off (measured)"
    severity: Severity = "error" if error is not None and error > LARGEST_SUM_ERROR else "warning"
    text = f"{n} micro-batches are added up in {dtype}{measured}."
    facts = {"dtype": dtype, "error": error, "micro_batches": n}
    yield run.finding("low-precision-sum", severity, update.first_spot, text, facts)


def _sum_error(update: LoopUpdate) -> float | None:
    """Return the relative error of `.grad` as the sum of the passes; None if something else changed it."""
    is_changed = update.is_assigned or update.stale or any(one.kind in ("clip", "unscale") for one in update.actions)
    if is_changed or any(one.sync is not None for one in update.passes):
        return None
    squared = size = 0.0
    for key, row in update.probe.items():
        for place, value in enumerate(row):
            exact = math.fsum(one.probe[key][place] for one in update.passes if key in one.probe)
            squared, size = squared + (value - exact) ** 2, size + exact**2
    return math.sqrt(squared / size) if size else None


def _learning_rate(run: OptimizerRun, update: LoopUpdate) -> Iterator[Finding]:
    optimizer = run.loop.optimizers[run.optimizer]
    rate, n = (update.lr or (0.0,))[0], run.size
    if n < 2 or not rate or not run.is_usually_whole:
        return  # a loss that is not divided makes the step larger already
    kind = str(optimizer.get("kind", ""))
    is_adam = "adam" in kind.lower()
    rule, better = ("the square-root rule", rate * math.sqrt(n)) if is_adam else ("the linear rule", rate * n)
    rows = f" of {run.rows} rows" if run.rows else ""
    text = (
        f"One update learns from {n} micro-batches{rows}, {n} times fewer updates than without accumulation. If the learning "
        f"rate {rate:g} was chosen for one micro-batch, {rule} for {kind or 'this optimizer'} says {better:.3g}, with a "
        "warm-up. Advice, not an error."
    )
    facts = {"lr": rate, "suggested": better, "micro_batches": n}
    found = run.finding("learning-rate", "note", optimizer["spot"], text, facts)
    yield replace(found, own_fix=found.own_fix.replace(")", ', rule="sqrt")')) if is_adam else found


def _unreadable(run: OptimizerRun) -> Iterator[Finding]:
    if run.is_by_hand:
        text = (
            "The gradients of this optimizer are written by hand: they are no multiple of what backward brought. "
            "What one batch would give cannot be told."
        )
        yield run.finding("by-hand", "note", run.steps[-1].spot, text, {"updates": len(run.steps)})
        return
    opaque = [update for update in run.updates if update.weighing is None and update.passes]
    if opaque and 2 * len(opaque) > len(run.updates):
        text = (
            "The weight of this loss cannot be read: it is made by a function that hides how many terms it took "
            "together. Whether it is divided rightly cannot be told."
        )
        yield run.finding("opaque-loss", "note", opaque[-1].first_spot, text, {"updates": len(opaque)})


def _eval(loop: WatchedLoop) -> Iterator[Finding]:
    used = [one for update in loop.updates for one in update.passes]
    trained = [one for one in used if not one.is_eval]
    still = [one for one in used if one.is_eval and trained and one.serial > trained[0].serial]
    if still and not any(one.serial > still[-1].serial for one in trained):
        noun = plural(len(still), "micro-batch")
        text = f"model.eval() is still on in {noun}: dropout and BatchNorm do not train any more."
        yield finding_at(still[0].spot, "eval-left-on", "warning", text, {"passes": len(still)})


def _windows(runs: list[OptimizerRun]) -> Iterator[Finding]:
    serials = {run.optimizer: {one.serial for update in run.updates for one in update.passes} for run in runs}
    for one, other in combinations(runs, 2):
        is_differing = 0 < one.size != other.size > 0 and min(len(one.updates), len(other.updates)) > 1
        if is_differing and serials[one.optimizer] & serials[other.optimizer]:
            text = (
                "Two optimizers learn from the same backward passes and step on different windows: one after "
                f"{one.size} micro-batches, the other after {other.size}."
            )
            spot = other.updates[0].spot
            yield other.finding("windows-differ", "warning", spot, text, {"sizes": [one.size, other.size]})
