"""Many ranks: when gradients are synchronised, and which rows each rank sees."""

import math
from collections.abc import Iterator, Mapping, Sequence

from anybatch.doctor.finding import Finding, Severity
from anybatch.doctor.loop_case import LoopCase, fix_for
from anybatch.doctor.loops import LossPass, Spot, WatchedLoop, spot_of


def rank_rules(case: LoopCase) -> Iterator[Finding]:
    """DDP's and FSDP2's switches."""
    for update in case.updates:
        told = [(one, one.sync) for one in update.passes if one.sync is not None]
        if not told:
            continue
        forward = [sync[0] for _, sync in told]
        torn = [one for one, sync in told if sync[0] and not sync[1]]
        facts = {"update": update.number, "synchronised": forward}
        if torn:
            text = (
                f"no_sync is around backward only ({len(torn)} of {len(told)} passes of update {update.number}): "
                "DDP decides at "
                f"forward, so these gradients are synchronised or not by accident, and are wrong."
            )
            yield case.finding("ddp-backward-only", "error", torn[0].spot, text, facts)
        elif not any(forward):
            came = (
                "FSDP2 keeps the gradients of such passes aside, and the step has none: nothing is learnt."
                if update.is_empty
                else "every rank steps on its own gradients, and the ranks drift apart."
            )
            text = f"No micro-batch of update {update.number} is synchronised: {came}"
            yield case.finding("ddp-never", "error", update.spot, text, facts)
        elif len(case.lanes[case.updates.index(update)]) > 1 and all(forward):
            text = (
                f"Gradients are synchronised in all {len(told)} micro-batches of update {update.number}; once is enough. "
                f"The result is the same, and {len(told) - 1} of {len(told)} reductions are for nothing."
            )
            yield case.finding("ddp-every-pass", "warning", told[0][0].spot, text, facts)


def row_rules(loop: WatchedLoop, cases: list[LoopCase]) -> Iterator[Finding]:
    """Rows that count more than once."""
    yield from _same_rows_again(cases)
    used = {one.batch[0] for one in loop.passes if one.batch is not None}
    for line in loop.epochs:
        if line["event"] != "epoch" or line["loader"] not in used or loop.world < 2 or line["number"] > 1:
            continue
        told = _dealt(line, loop.world)
        if told is not None:
            kind, severity, text, facts = told
            yield _at(kind, severity, spot_of(line.get("place")), text, facts)


def rules_across(loops: Sequence[WatchedLoop]) -> Iterator[Finding]:
    """Batches of one rank that are those of another: what no sampler says, such as a stream that nobody deals out."""
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
            yield _at("rows-repeated", "error", theirs[min(same)], text, facts)
            return


def _marks(loop: WatchedLoop) -> dict[float, Spot]:
    """The batches of the first epoch; none where they are not told apart."""
    begun = {
        (line["loader"], line["number"]): spot_of(line.get("place")) for line in loop.epochs if line["event"] == "epoch"
    }
    first = [one for one in loop.passes if one.mark is not None and one.batch is not None and one.batch[1] == 1]
    batches = {one.batch: one.mark for one in first}
    is_told_apart = len(set(batches.values())) == len(batches)
    return {one.mark: begun.get(one.batch[:2], one.spot) for one in first if one.mark and one.batch and is_told_apart}


def _at(kind: str, severity: Severity, spot: Spot, text: str, facts: Mapping[str, object]) -> Finding:
    return Finding(
        kind=kind,
        severity=severity,
        file=spot.file,
        line=spot.line,
        message=text,
        evidence=facts,
        fix=fix_for("rows-repeated"),
    )


def _dealt(line: Mapping[str, object], world: int) -> tuple[str, Severity, str, dict[str, object]] | None:
    rows = line.get("dataset")
    if not isinstance(rows, int):
        return None
    if line.get("is_plain"):
        text = (
            f"Each of {world} ranks reads all {rows:,} rows: every row counts {world} times in an epoch, and {world} "
            "ranks do the work of one."
        )
        return "rows-repeated", "error", text, {"rows": rows, "world": world}
    dealt = line.get("dealt")
    batch = line.get("batch_size")
    if line.get("is_even") and isinstance(batch, int):
        dealt = math.ceil(rows / (batch * world)) * batch * world
    if isinstance(dealt, int) and dealt > rows:
        text = (
            f"{dealt - rows:,} of {rows:,} rows count twice in an epoch, because {rows:,} rows cannot be dealt evenly "
            f"to {world} ranks."
        )
        return "rows-repeated", "warning", text, {"rows": rows, "dealt": dealt, "world": world}
    if isinstance(dealt, int) and dealt < rows:
        text = (
            f"{rows - dealt:,} of {rows:,} rows are dealt to no rank in an epoch, because the sampler drops what cannot be "
            f"dealt evenly to {world} ranks."
        )
        return "tail-dropped", "warning", text, {"rows": rows, "dealt": dealt, "world": world}
    return None


def _same_rows_again(cases: list[LoopCase]) -> Iterator[Finding]:
    for case in cases:
        for update, lanes in zip(case.updates, case.lanes, strict=True):
            if len(lanes) < 2 or any(len(lane) != 1 for lane in lanes):
                continue
            gradients = [_unit(lane[0]) for lane in lanes]
            twice = len(gradients) - len(set(gradients))
            if all(gradients) and twice and any(value for value in gradients[0]):
                text = (
                    f"{twice + 1} micro-batches of update {update.number} brought the very same gradient: the same rows "
                    f"were run again instead of new ones."
                )
                spot = _restarted(case.loop, [lane[0] for lane in lanes]) or lanes[0][0].spot
                yield case.finding("rows-repeated", "error", spot, text, {"update": update.number, "same": twice + 1})
                return


def _restarted(loop: WatchedLoop, passes: list[LossPass]) -> Spot | None:
    """Where the loader is begun anew for every micro-batch: `next(iter(loader))`."""
    batches = [one.batch for one in passes]
    if any(batch is None or batch[2] != 0 for batch in batches) or len(set(batches)) != len(batches):
        return None
    return next(
        (
            spot_of(line.get("place"))
            for line in loop.epochs
            if line["event"] == "epoch" and batches[0] is not None and line["loader"] == batches[0][0]
        ),
        None,
    )


def _unit(one: LossPass) -> tuple[float, ...]:
    weight = one.terms[0].weight if one.terms else 1.0
    flat = [value for key in sorted(one.probe) for value in one.probe[key]]
    return tuple(float(f"{value / weight:.5g}") for value in flat) if weight and any(flat) else ()
