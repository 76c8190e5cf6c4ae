"""Logs in, a diagnosis out: the findings of all ranks put together, and the micro-batches of each update."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anybatch.display import html_block, html_table, plural
from anybatch.doctor.finding import SEVERITIES, Finding, in_order, name_ranks
from anybatch.doctor.loops import HAPPENINGS, Log, OptimizerRun, WatchedLoop, read_logs
from anybatch.doctor.rules import (
    logging_rules,
    loop_rules,
    lost_rules,
    model_rules,
    order_rules,
    rank_rules,
    row_rules,
    rules_across,
    weight_rules,
)
from anybatch.doctor.updates import LoopUpdate

SHOWN_EVENTS = 44
"""Events of the time line."""
PER_OPTIMIZER = (weight_rules, order_rules, rank_rules, model_rules, logging_rules)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Findings, and the loops that they were found in."""

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
        return ", ".join(plural(count, severity) for severity, count in self.num_findings.items())

    @property
    def num_findings(self) -> dict[str, int]:
        """How many findings of each severity."""
        return {severity: sum(each.severity == severity for each in self.findings) for severity in SEVERITIES}

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
            "updates": [describe_update(update) for loop in first for update in loop.updates],
            "lost": [
                {
                    "serial": one.loss_pass.serial,
                    "line": one.loss_pass.spot.line,
                    "rows": one.loss_pass.rows,
                    "cleared_at": one.spot.line,
                }
                for loop in first
                for one in loop.lost
            ],
            "timeline": [event for loop in first for event in _timeline(loop)],
            "ended": [loop.reason for loop in self.loops],
        }


def judge_folder(folder: Path) -> Diagnosis:
    """The logs of a run, of every process that trained."""
    return judge([log for log in read_logs(folder) if log.has_passes])


def judge(logs: list[Log]) -> Diagnosis:
    """Pure: the same logs give the same findings."""
    loops = tuple(map(WatchedLoop, logs))
    found = name_ranks([(loop.rank, finding) for loop in loops for finding in _findings_of(loop)])
    return Diagnosis(in_order([*found, *rules_across(loops)]), loops)


def _findings_of(loop: WatchedLoop) -> list[Finding]:
    runs = [OptimizerRun(loop, optimizer) for optimizer in sorted(loop.optimizers) if loop.updates_of(optimizer)]
    found = [finding for run in runs for rule in PER_OPTIMIZER for finding in rule(run)]
    if runs:
        found += [*lost_rules(loop, runs), *row_rules(loop, runs)]
    return [*found, *loop_rules(loop, runs)]


def describe_update(update: LoopUpdate) -> dict[str, Any]:
    """Describe the micro-batches and events of an update, for JSON."""
    parts, weighing = update.micro_batches, update.weighing
    unknown = (None,) * len(parts)
    shares, counts = (weighing.shares, weighing.counts) if weighing is not None else (unknown, unknown)
    return {
        "update": update.number,
        "optimizer": update.optimizer,
        "seconds": update.seconds,
        "lr": list(update.lr),
        "file": update.spot.file,
        "line": update.spot.line,
        "stale": len(update.stale),
        "weights_add_up_to": weighing.total if weighing is not None else None,
        "micro_batches": [
            {
                "rows": first.rows,
                "terms": count,
                "weight": share,
                "loss": first.loss,
                "seconds": first.seconds,
                "line": first.spot.line,
                "batch": list(first.batch) if first.batch is not None else None,
            }
            for (first, *_), share, count in zip(parts, shares, counts, strict=True)
        ],
        "events": [
            {"what": one.kind, "line": one.spot.line, "seconds": one.seconds}
            for one in update.happenings
            if one.kind in HAPPENINGS
        ],
    }


def _timeline(loop: WatchedLoop) -> list[dict[str, Any]]:
    """Everything in the order in which it came, of the first updates."""
    used: dict[int, tuple[int, float | None]] = {}
    for update in loop.updates:
        for lane, passes in enumerate(update.micro_batches):
            weight = update.weighing.shares[lane] if update.weighing is not None else None
            used |= {one.serial: (lane, weight) for one in passes}
    happened: list[tuple[int, dict[str, Any]]] = [
        (one.index, {"what": one.kind, "line": one.spot.line}) for one in loop.happenings if one.kind in HAPPENINGS
    ]
    happened += [(update.index, {"what": "step", "line": update.spot.line}) for update in loop.updates]
    lost_lane = 0
    for one in loop.passes:
        is_used = one.serial in used
        lane, weight = used.get(one.serial, (lost_lane, one.terms[0].weight if one.terms else None))
        lost_lane = 0 if is_used else lane + 1
        facts = {"line": one.spot.line, "lane": min(lane, 15), "weight": weight, "is_used": is_used}
        happened.append((one.index, {"what": "backward", **facts}))
    return [event for _, event in sorted(happened, key=lambda one: one[0])][:SHOWN_EVENTS]
