"""Judge logs: apply the rules to every loop, merge the findings of all ranks, and describe the updates."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anybatch.display import html_block, html_table, plural
from anybatch.doctor.finding import SEVERITIES, Finding
from anybatch.doctor.log import Log, read_logs
from anybatch.doctor.loops import ACTIONS, WatchedLoop
from anybatch.doctor.rules import findings_of, rules_across_ranks
from anybatch.doctor.updates import LoopUpdate

SHOWN_EVENTS = 44
"""Events of the timeline."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of watching a training loop.

    Attributes:
        findings: Problems, errors first; each kind is reported once per line.
        loops: The watched processes, by rank; the internal record that the findings were made from.
    """

    findings: tuple[Finding, ...]
    loops: tuple[WatchedLoop, ...]

    def __repr__(self) -> str:
        return f"Diagnosis({self._counts()})"

    def _repr_html_(self) -> str:
        rows = [[each.severity, each.line, each.message, each.fix] for each in self.findings]
        table = html_table(["", "line", "what", "fix"], rows) if rows else ""
        return html_block(f"The doctor found {self._counts()}", table)

    def _counts(self) -> str:
        return ", ".join(plural(count, severity) for severity, count in self.num_findings.items())

    @property
    def num_findings(self) -> dict[str, int]:
        """Number of findings by severity."""
        return {severity: sum(each.severity == severity for each in self.findings) for severity in SEVERITIES}

    @property
    def has_errors(self) -> bool:
        """True if some update is not what one batch would give."""
        return self.num_findings["error"] > 0

    def at_least(self, severity: str) -> tuple[Finding, ...]:
        """Return the findings of this severity and worse ones.

        Args:
            severity: "error", "warning" or "note"; any other word, such as "never", selects nothing.

        Returns:
            The findings, errors first.
        """
        bad = SEVERITIES[: SEVERITIES.index(severity) + 1] if severity in SEVERITIES else ()
        return tuple(finding for finding in self.findings if finding.severity in bad)

    def as_json(self) -> dict[str, Any]:
        """Return what `anybatch doctor --json` prints.

        Returns:
            `findings` of all ranks; `updates`, `lost` (passes that no step used) and `timeline` of rank 0; and `ended`,
            for each rank "finished", "updates", "error" or "killed".
        """
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
    """Judge the logs of all processes of a run that trained."""
    return judge([log for log in read_logs(folder) if log.has_passes])


def judge(logs: list[Log]) -> Diagnosis:
    """Judge the logs of one run; the same logs give the same findings."""
    loops = tuple(map(WatchedLoop, logs))
    found = [(loop.rank, finding) for loop in loops for finding in findings_of(loop)]
    ranks: dict[tuple[str, str, int], set[int]] = {}
    for rank, one in found:
        ranks.setdefault((one.kind, one.file, one.line), set()).add(rank)
    findings = [one for _, one in found]
    if len({rank for rank, _ in found}) > 1:
        named = [sorted(ranks[one.kind, one.file, one.line]) for one in findings]
        findings = [
            replace(one, evidence={**one.evidence, "ranks": on}) for one, on in zip(findings, named, strict=True)
        ]
    findings = sorted([*findings, *rules_across_ranks(loops)], key=lambda one: SEVERITIES.index(one.severity))
    first: dict[tuple[str, str, int], Finding] = {}
    for one in findings:
        first.setdefault((one.kind, one.file, one.line), one)
    return Diagnosis(tuple(first.values()), loops)


def describe_update(update: LoopUpdate) -> dict[str, Any]:
    """Return the micro-batches and actions of an update, for JSON."""
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
            for one in update.actions
            if one.kind in ACTIONS
        ],
    }


def _timeline(loop: WatchedLoop) -> list[dict[str, Any]]:
    """Return the first events in order; `lane` is the micro-batch within its update."""
    used: dict[int, tuple[int, float | None]] = {}
    for update in loop.updates:
        for lane, passes in enumerate(update.micro_batches):
            weight = update.weighing.shares[lane] if update.weighing is not None else None
            used |= {one.serial: (lane, weight) for one in passes}
    events: list[tuple[int, dict[str, Any]]] = [
        (one.index, {"what": one.kind, "line": one.spot.line}) for one in loop.actions if one.kind in ACTIONS
    ]
    events += [(update.index, {"what": "step", "line": update.spot.line}) for update in loop.updates]
    lost_lane = 0
    for one in loop.passes:
        is_used = one.serial in used
        lane, weight = used.get(one.serial, (lost_lane, one.terms[0].weight if one.terms else None))
        lost_lane = 0 if is_used else lane + 1
        facts = {"line": one.spot.line, "lane": min(lane, 15), "weight": weight, "is_used": is_used}
        events.append((one.index, {"what": "backward", **facts}))
    return [event for _, event in sorted(events, key=lambda one: one[0])][:SHOWN_EVENTS]
