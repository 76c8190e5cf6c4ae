"""Rules on the model and its numbers: BatchNorm, negatives, precision, graphs; and notes on what cannot be told."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from anybatch.display import plural
from anybatch.doctor.finding import Finding, Severity, finding_at
from anybatch.doctor.loops import OptimizerRun, WatchedLoop, spot_of
from anybatch.doctor.updates import LoopUpdate, LossPass

LOW = ("bfloat16", "float16")
SMALLEST = 5e-3
"""Error of a 16-bit sum above which it is an error."""


def model_rules(run: OptimizerRun) -> Iterator[Finding]:
    """Per optimizer."""
    accumulated = [update for update in run.updates if len(update.micro_batches) > 1]
    if accumulated:
        update = accumulated[-1]
        yield from _batch_norm(run, update, [passes[0] for passes in update.micro_batches])
        yield from _negatives(run, update)
        yield from _low_precision(run, accumulated)
        yield from _learning_rate(run, update)
    yield from _untold(run)


def loop_rules(loop: WatchedLoop, runs: list[OptimizerRun]) -> Iterator[Finding]:
    """Rules on the whole loop."""
    for line in loop.others.get("kept", ()):
        name = line.get("variable")
        who = f"`{name}` keeps" if name else "something keeps"
        text = (
            f"{who} the graphs of earlier losses alive: {line.get('alive')} of them by now, and each is memory that is "
            "never freed."
        )
        yield _of_line("kept-graph", "warning", line, text)
    for line in loop.others.get("unowned", ()):
        shapes = "; ".join("x".join(map(str, shape)) or "1" for shape in line.get("shapes", [])[:4])
        text = (
            f"{plural(int(line.get('count', 1)), 'parameter')} of the loss ({shapes}) are in no optimizer: they get "
            "gradients and never change."
        )
        yield _of_line("unowned-parameters", "warning", line, text)
    for line in loop.others.get("trouble", ()):
        text = (
            f"The recorder failed and stopped watching: {line.get('error')} (in {line.get('within')}, line "
            f"{line.get('line')})."
        )
        yield _of_line("recorder-trouble", "note", line, text)
    yield from _eval(loop)
    yield from _windows(runs)


def _of_line(kind: str, severity: Severity, line: Mapping[str, Any], text: str) -> Finding:
    facts = {key: line[key] for key in ("alive", "variable", "count", "shapes", "error") if key in line}
    return finding_at(spot_of(line.get("place")), kind, severity, text, facts)


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


def _low_precision(run: OptimizerRun, updates: Sequence[LoopUpdate]) -> Iterator[Finding]:
    update = max(updates, key=lambda one: len(one.passes))
    low = [dtype for one in update.passes for dtype in one.dtypes if dtype in LOW]
    if not low:
        return
    error = None if update.is_assigned or update.stale else _sum_error(update)
    n, dtype = len(update.passes), low[0]
    told = "" if error is None else f": the sum is {100 * error:.2g} % off (measured)"
    severity: Severity = "error" if error is not None and error > SMALLEST else "warning"
    facts = {"dtype": dtype, "error": error, "micro_batches": n}
    text = f"{n} micro-batches are added up in {dtype}{told}."
    yield run.finding("low-precision-sum", severity, update.first_spot, text, facts)


def _sum_error(update: LoopUpdate) -> float | None:
    is_changed = any(one.kind in ("clip", "unscale") for one in update.happenings)
    if is_changed or any(one.sync is not None for one in update.passes):
        return None
    squared = size = 0.0
    for key, row in update.probe.items():
        for place, value in enumerate(row):
            exact = math.fsum(one.probe[key][place] for one in update.passes if key in one.probe)
            squared, size = squared + (value - exact) ** 2, size + exact**2
    return math.sqrt(squared / size) if size else None


def _learning_rate(run: OptimizerRun, update: LoopUpdate) -> Iterator[Finding]:
    optimizer = run.loop.optimizers.get(run.optimizer, {})
    kind = str(optimizer.get("kind", ""))
    rate, n = (update.lr or (0.0,))[0], run.size
    if n < 2 or not rate or not run.is_usually_whole:
        return  # one that is not divided has a larger step already
    is_adam = "adam" in kind.lower()
    rule, better = ("the square-root rule", rate * math.sqrt(n)) if is_adam else ("the linear rule", rate * n)
    rows = f" of {run.rows} rows" if run.rows else ""
    text = (
        f"One update learns from {n} micro-batches{rows}, {n} times fewer updates than without accumulation. If the learning "
        f"rate {rate:g} was chosen for one micro-batch, {rule} for {kind or 'this optimizer'} says {better:.3g}, with a "
        "warm-up. Advice, not an error."
    )
    facts = {"lr": rate, "suggested": better, "micro_batches": n}
    found = run.finding("learning-rate", "note", spot_of(optimizer.get("place")), text, facts)
    yield replace(found, own_fix=found.own_fix.replace(")", ', rule="sqrt")')) if is_adam else found


def _untold(run: OptimizerRun) -> Iterator[Finding]:
    steps = run.loop.updates_of(run.optimizer)
    if not steps:
        return
    if run.is_by_hand:
        text = (
            "The gradients of this optimizer are written by hand: they are no multiple of what backward brought. "
            "What one batch would give cannot be told."
        )
        yield run.finding("by-hand", "note", steps[-1].spot, text, {"updates": len(steps)})
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
