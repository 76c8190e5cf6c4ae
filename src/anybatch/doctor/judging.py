"""Logs in, a diagnosis out: the findings of all ranks put together, and what each update was made of."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anybatch.display import html_block, html_table
from anybatch.doctor.finding import SEVERITIES, Finding, in_order, of_ranks
from anybatch.doctor.loop_case import LoopCase
from anybatch.doctor.loops import Lane, Log, LoopUpdate, Lost, WatchedLoop, lanes_of, loop_of, read_logs, weigh
from anybatch.doctor.rules import (
    logging_rules,
    loop_rules,
    lost_rules,
    model_rules,
    order_rules,
    rank_rules,
    row_rules,
    rules_across,
    tail_rules,
    weight_rules,
)

TOLD = ("clip", "schedule", "unscale", "scaler-update", "zero")
SHOWN_EVENTS = 44
"""Events of the time line."""
PER_OPTIMIZER = (weight_rules, tail_rules, order_rules, rank_rules, model_rules, logging_rules)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found, and what was seen."""

    findings: tuple[Finding, ...]
    loops: tuple[WatchedLoop, ...]

    def __repr__(self) -> str:
        return f"Diagnosis({self._counts()})"

    def _repr_html_(self) -> str:
        rows = [[each.severity, each.line, each.message, each.fix] for each in self.findings]
        return html_block(
            f"The doctor found {self._counts()}", html_table(["", "line", "what", "fix"], rows) if rows else ""
        )

    def _counts(self) -> str:
        """How many findings of each severity, in words."""
        found = {severity: sum(each.severity == severity for each in self.findings) for severity in SEVERITIES}
        return ", ".join(f"{count} {severity}{'' if count == 1 else 's'}" for severity, count in found.items())

    @property
    def has_errors(self) -> bool:
        """Some update is not what one batch would give."""
        return any(finding.severity == "error" for finding in self.findings)

    def at_least(self, severity: str) -> tuple[Finding, ...]:
        """Findings that are as bad, or worse."""
        bad = SEVERITIES[: SEVERITIES.index(severity) + 1] if severity in SEVERITIES else ()
        return tuple(finding for finding in self.findings if finding.severity in bad)

    def as_json(self) -> dict[str, Any]:
        """For `--json`: `findings`, and `updates` of rank 0."""
        first = self.loops[:1]
        return {
            "findings": [finding.as_json() for finding in self.findings],
            "updates": [described for loop in first for described in described_updates(loop)],
            "lost": [_lost(one) for loop in first for one in loop.lost],
            "timeline": [event for loop in first for event in timeline(loop)],
            "ended": [loop.reason for loop in self.loops],
        }


def judge_folder(folder: Path) -> Diagnosis:
    """The logs of a run, of every process that trained."""
    return judge([log for log in read_logs(folder) if log.has_passes])


def judge(logs: list[Log]) -> Diagnosis:
    """Pure: the same logs give the same findings."""
    loops = tuple(loop_of(log) for log in logs)
    found = of_ranks([(loop.rank, finding) for loop in loops for finding in findings_of(loop)])
    return Diagnosis(in_order([*found, *rules_across(loops)]), loops)


def findings_of(loop: WatchedLoop) -> list[Finding]:
    """Of one process."""
    cases = [LoopCase(loop, optimizer) for optimizer in sorted(loop.optimizers)]
    stepped = [case for case in cases if loop.updates_of(case.optimizer)]
    found = [finding for case in stepped for rule in PER_OPTIMIZER for finding in rule(case)]
    if stepped:
        found += [*lost_rules(loop, stepped), *row_rules(loop, stepped)]
    return [*found, *loop_rules(loop, stepped)]


def described_updates(loop: WatchedLoop) -> list[dict[str, Any]]:
    """What each update was made of."""
    return [_described(update) for update in loop.updates]


def _lost(one: Lost) -> dict[str, Any]:
    lost = one.loss_pass
    return {"serial": lost.serial, "line": lost.spot.line, "rows": lost.rows, "cleared_at": one.spot.line}


def timeline(loop: WatchedLoop) -> list[dict[str, Any]]:
    """Everything in the order in which it came, of the first updates."""
    lanes = {
        one.serial: (lane, weight)
        for update in loop.updates
        for lane, (passes, weight) in enumerate(zip(lanes_of(update.passes), _weights(update), strict=True))
        for one in passes
    }
    happened = [(one.index, {"what": one.kind, "line": one.spot.line}) for one in loop.happenings if one.kind in TOLD]
    happened += [(update.index, {"what": "step", "line": update.spot.line}) for update in loop.updates]
    lost_lane = 0
    for one in loop.passes:
        lane, weight = lanes.get(one.serial, (lost_lane, one.terms[0].weight if one.terms else None))
        lost_lane = lane + 1 if one.serial not in lanes else 0
        facts = {
            "what": "backward",
            "line": one.spot.line,
            "lane": min(lane, 15),
            "weight": weight,
            "is_used": one.serial in lanes,
        }
        happened.append((one.index, facts))
    return [event for _, event in sorted(happened, key=lambda one: one[0])][:SHOWN_EVENTS]


def _weights(update: LoopUpdate) -> tuple[float | None, ...]:
    weighing = weigh(update)
    return weighing.shares if weighing is not None else (None,) * len(lanes_of(update.passes))


def _described(update: LoopUpdate) -> dict[str, Any]:
    lanes, weighing = lanes_of(update.passes), weigh(update)
    shares = weighing.shares if weighing is not None else (None,) * len(lanes)
    counts = weighing.counts if weighing is not None else (None,) * len(lanes)
    return {
        "update": update.number,
        "optimizer": update.optimizer,
        "seconds": update.seconds,
        "lr": list(update.lr),
        "file": update.spot.file,
        "line": update.spot.line,
        "stale": len(update.stale),
        "weights_add_up_to": weighing.total if weighing is not None else None,
        "micro_batches": [_lane(*row) for row in zip(lanes, shares, counts, strict=True)],
        "events": [
            {"what": one.kind, "line": one.spot.line, "seconds": one.seconds}
            for one in update.happenings
            if one.kind in TOLD
        ],
    }


def _lane(lane: Lane, share: float | None, count: float | None) -> dict[str, Any]:
    first = lane[0]
    return {
        "rows": first.rows,
        "terms": count,
        "weight": share,
        "loss": first.loss,
        "seconds": first.seconds,
        "line": first.spot.line,
        "batch": list(first.batch) if first.batch is not None else None,
    }
