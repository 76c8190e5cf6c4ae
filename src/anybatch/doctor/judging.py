"""Logs in, a diagnosis out: the findings of all ranks put together, and what each update was made of."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anybatch.doctor.finding import SEVERITIES, Finding, in_order
from anybatch.doctor.log_lines import Log, read_logs
from anybatch.doctor.loop_case import LoopCase
from anybatch.doctor.loop_facts import Loop, LoopUpdate
from anybatch.doctor.loop_windows import loop_of
from anybatch.doctor.rules import (
    loop_rules,
    lost_rules,
    model_rules,
    order_rules,
    rank_rules,
    row_rules,
    tail_rules,
    weight_rules,
)
from anybatch.doctor.weighing import Lane, lanes_of, weigh

PER_OPTIMIZER = (weight_rules, tail_rules, order_rules, rank_rules, model_rules)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found, and what was seen."""

    findings: tuple[Finding, ...]
    loops: tuple[Loop, ...]

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
        updates = [described for loop in self.loops[:1] for described in described_updates(loop)]
        reasons = [loop.reason for loop in self.loops]
        return {"findings": [finding.as_json() for finding in self.findings], "updates": updates, "ended": reasons}


def judge_folder(folder: Path) -> Diagnosis:
    """The logs of a run, of every process that trained."""
    return judge([log for log in read_logs(folder) if log.has_passes])


def judge(logs: list[Log]) -> Diagnosis:
    """Pure: the same logs give the same findings."""
    loops = tuple(loop_of(log) for log in logs)
    return Diagnosis(in_order([finding for loop in loops for finding in findings_of(loop)]), loops)


def findings_of(loop: Loop) -> list[Finding]:
    """Of one process."""
    cases = [LoopCase(loop, optimizer) for optimizer in sorted(loop.optimizers)]
    stepped = [case for case in cases if loop.updates_of(case.optimizer)]
    found = [finding for case in stepped for rule in PER_OPTIMIZER for finding in rule(case)]
    if stepped:
        found += [*lost_rules(loop, stepped), *row_rules(loop, stepped)]
    return [*found, *loop_rules(loop, stepped)]


def described_updates(loop: Loop) -> list[dict[str, Any]]:
    """What each update was made of."""
    return [_described(update) for update in loop.updates]


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
            if one.kind in ("clip", "schedule", "unscale", "scaler-update", "zero")
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
