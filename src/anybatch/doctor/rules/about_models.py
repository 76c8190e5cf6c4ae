"""What the model and its numbers make of accumulation: BatchNorm, negatives, precision, graphs; and what cannot be told."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from anybatch.doctor.finding import Finding, Severity
from anybatch.doctor.loop_case import LoopCase, first_spot, fix_for, plural
from anybatch.doctor.loops import LoopUpdate, LossPass, WatchedLoop, spot_of

LOW = ("bfloat16", "float16")
SMALLEST = 5e-3
"""Error of a 16-bit sum above which it is an error."""


def model_rules(case: LoopCase) -> Iterator[Finding]:
    """Per optimizer."""
    pairs = [(update, lanes) for update, lanes in zip(case.updates, case.lanes, strict=True) if len(lanes) > 1]
    if pairs:
        update = pairs[-1][0]
        yield from _batch_norm(case, update, [lane[0] for lane in pairs[-1][1]])
        yield from _negatives(case, update, len(pairs[-1][1]))
        yield from _low_precision(case, [update for update, _ in pairs])
        yield from _learning_rate(case, update)
    yield from _untold(case)


def loop_rules(loop: WatchedLoop, cases: list[LoopCase]) -> Iterator[Finding]:
    """Of the whole loop."""
    for line in loop.others.get("kept", ()):
        name = line.get("variable")
        who = f"`{name}` keeps" if name else "something keeps"
        text = (
            f"{who} the graphs of earlier losses alive: {line.get('alive')} of them by now, and each is memory that "
            "is never freed."
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
    yield from _windows(cases)


def _of_line(kind: str, severity: Severity, line: object, text: str) -> Finding:
    assert isinstance(line, dict)
    spot = spot_of(line.get("place"))
    facts = {key: line[key] for key in ("alive", "variable", "count", "shapes", "error") if key in line}
    return Finding(
        kind=kind, severity=severity, file=spot.file, line=spot.line, message=text, evidence=facts, fix=fix_for(kind)
    )


def _batch_norm(case: LoopCase, update: LoopUpdate, passes: Sequence[LossPass]) -> Iterator[Finding]:
    if not all(one.norm_forwards for one in passes):
        return
    n = len(passes)
    norms = [one.norms for one in passes if one.norms]
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
    yield case.finding("batch-norm", "warning", passes[0].spot, text + ".", facts)


def _variance_error(norms: Sequence[object]) -> float:
    rows = [norm for norm in norms if isinstance(norm, dict)]
    counts = [row["count"] for row in rows]
    total = sum(counts)
    worst = []
    for channel in range(len(rows[0]["mean"])):
        mean = sum(r["mean"][channel] * c for r, c in zip(rows, counts, strict=True)) / total
        pooled = (
            sum((r["var"][channel] + (r["mean"][channel] - mean) ** 2) * c for r, c in zip(rows, counts, strict=True))
            / total
        )
        off = [abs(r["var"][channel] - pooled) / pooled for r in rows] if pooled else [0.0]
        worst.append(sum(off) / len(off))
    return sum(worst) / len(worst) if worst else 0.0


def _negatives(case: LoopCase, update: LoopUpdate, n: int) -> Iterator[Finding]:
    pairs = [max((term.pairs for term in one.terms), default=0) for one in update.passes]
    if not pairs or not all(pairs) or len(case.loop.passes) < 3:
        return
    if not all(
        any(term.pairs for term in one.terms)
        for one in case.loop.passes
        if one.spot.chain == update.passes[0].spot.chain
    ):
        return
    rows = sum(pairs)
    text = (
        f"A contrastive loss over {pairs[0]} rows is accumulated {n} times: every row is compared with {pairs[0] - 1} others "
        f"instead of {rows - 1}, so this is another loss, not that of {rows} rows."
    )
    yield case.finding("negatives-missing", "error", update.passes[0].spot, text, {"rows": pairs[0], "batch": rows})


def _low_precision(case: LoopCase, updates: Sequence[LoopUpdate]) -> Iterator[Finding]:
    update = max(updates, key=lambda one: len(one.passes))
    if not any(dtype in LOW for one in update.passes for dtype in one.dtypes):
        return
    error = None if update.is_assigned or update.stale else _sum_error(update)
    n = len(update.passes)
    dtype = next(dtype for one in update.passes for dtype in one.dtypes if dtype in LOW)
    told = "" if error is None else f": the sum is {100 * error:.2g} % off (measured)"
    severity: Severity = "error" if error is not None and error > SMALLEST else "warning"
    yield case.finding(
        "low-precision-sum",
        severity,
        first_spot(update.passes),
        f"{n} micro-batches are added up in {dtype}{told}.",
        {"dtype": dtype, "error": error, "micro_batches": n},
    )


def _sum_error(update: LoopUpdate) -> float | None:
    if any(one.kind in ("clip", "unscale") for one in update.happenings) or any(
        one.sync is not None for one in update.passes
    ):
        return None
    squared = size = 0.0
    for key, row in update.probe.items():
        for place, value in enumerate(row):
            exact = math.fsum(one.probe[key][place] for one in update.passes if key in one.probe)
            squared, size = squared + (value - exact) ** 2, size + exact**2
    return math.sqrt(squared / size) if size else None


def _learning_rate(case: LoopCase, update: LoopUpdate) -> Iterator[Finding]:
    kind = str(case.loop.optimizers.get(case.optimizer, {}).get("kind", ""))
    rate, n = (update.lr or (0.0,))[0], case.size
    if n < 2 or not rate or not case.is_usually_whole:
        return  # one that is not divided has a larger step already
    is_adam = "adam" in kind.lower()
    rule, better = ("the square-root rule", rate * math.sqrt(n)) if is_adam else ("the linear rule", rate * n)
    rows = f" of {case.rows} rows" if case.rows else ""
    text = (
        f"One update learns from {n} micro-batches{rows}, {n} times fewer updates than without accumulation. If "
        "the learning rate "
        f"{rate:g} was chosen for one micro-batch, {rule} for {kind or 'this optimizer'} says {better:.3g}, with "
        "a warm-up. Advice, not an error."
    )
    spot = spot_of(case.loop.optimizers.get(case.optimizer, {}).get("place"))
    found = case.finding("learning-rate", "note", spot, text, {"lr": rate, "suggested": better, "micro_batches": n})
    yield replace(found, fix=found.fix.replace(")", ', rule="sqrt")')) if is_adam else found


def _untold(case: LoopCase) -> Iterator[Finding]:
    steps = case.loop.updates_of(case.optimizer)
    if not steps:
        return
    if case.is_by_hand:
        text = (
            "The gradients of this optimizer are written by hand: they are no multiple of what backward brought. "
            "What one batch would give cannot be told."
        )
        yield case.finding("by-hand", "note", steps[-1].spot, text, {"updates": len(steps)})
        return
    opaque = [
        update
        for update, weighing in zip(case.updates, case.weighings, strict=True)
        if weighing is None and update.passes
    ]
    if opaque and 2 * len(opaque) > len(case.updates):
        text = (
            "The weight of this loss cannot be read: it is made by a function that hides how many terms it took "
            "together. Whether it is divided rightly cannot be told."
        )
        yield case.finding("opaque-loss", "note", first_spot(opaque[-1].passes), text, {"updates": len(opaque)})


def _eval(loop: WatchedLoop) -> Iterator[Finding]:
    used = [one for update in loop.updates for one in update.passes]
    trained = [one for one in used if not one.is_eval]
    still = [one for one in used if one.is_eval and trained and one.serial > trained[0].serial]
    if still and not any(one.serial > still[-1].serial for one in trained):
        spot = still[0].spot
        text = (
            f"model.eval() is still on in {plural(len(still), 'micro-batch')}: dropout and BatchNorm do not train "
            "any more."
        )
        yield Finding(
            kind="eval-left-on",
            severity="warning",
            file=spot.file,
            line=spot.line,
            message=text,
            evidence={"passes": len(still)},
            fix=fix_for("eval-left-on"),
        )


def _windows(cases: list[LoopCase]) -> Iterator[Finding]:
    for place, one in enumerate(cases):
        for other in cases[place + 1 :]:
            shared = {p.serial for u in one.updates for p in u.passes} & {
                p.serial for u in other.updates for p in u.passes
            }
            if (
                shared
                and one.size
                and other.size
                and one.size != other.size
                and len(one.updates) > 1
                and len(other.updates) > 1
            ):
                text = (
                    f"Two optimizers learn from the same backward passes and step on different windows: one after {one.size} "
                    f"micro-batches, the other after {other.size}."
                )
                yield other.finding(
                    "windows-differ", "warning", other.updates[0].spot, text, {"sizes": [one.size, other.size]}
                )
