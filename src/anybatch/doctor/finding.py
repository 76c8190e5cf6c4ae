"""What the doctor says: one finding each, frozen, with the line, the numbers and the fix."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
KINDS = (
    "cleared-before-use",
    "stepped-every-micro-batch",
    "not-divided",
    "divided-twice",
    "other-divisor",
    "tail-dropped",
    "tail-leaks",
    "left-at-end",
    "uneven-micro-batches",
    "clip-early",
    "clip-scaled",
    "clip-after-step",
    "schedule-per-micro-batch",
    "schedule-before-step",
    "schedule-horizon",
    "scaler-misuse",
    "ddp-every-pass",
    "ddp-backward-only",
    "ddp-never",
    "batch-norm",
    "never-cleared",
    "kept-graph",
    "unowned-parameters",
    "low-precision-sum",
    "off-by-one",
    "negatives-missing",
    "rows-repeated",
    "windows-differ",
    "eval-left-on",
    "loss-logged-divided",
    "learning-rate",
    "by-hand",
    "opaque-loss",
    "recorder-trouble",
)
"""Every kind, the same in text, JSON and docs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong, slow, or cannot be told."""

    kind: str
    severity: Severity
    """error: the update is not what one batch would give; warning: slow, or depends on intent; note: cannot be told."""
    file: str
    line: int
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    fix: str = ""

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "kind": self.kind,
            "severity": self.severity,
            "file": self.file,
            "line": self.line,
            "message": self.message,
            "evidence": dict(self.evidence),
            "fix": self.fix,
        }


def of_ranks(findings: list[tuple[int, Finding]]) -> list[Finding]:
    """The same finding of several ranks once, with the ranks that it is of; those of one process stay as they are."""
    ranks: dict[tuple[str, str, int], set[int]] = {}
    for rank, one in findings:
        ranks.setdefault((one.kind, one.file, one.line), set()).add(rank)
    if len({rank for rank, _ in findings}) < 2:
        return [one for _, one in findings]
    return [
        replace(one, evidence={**one.evidence, "ranks": sorted(ranks[one.kind, one.file, one.line])})
        for _, one in findings
    ]


def in_order(findings: list[Finding]) -> tuple[Finding, ...]:
    """Errors first, each kind and line once."""
    first: dict[tuple[str, str, int], Finding] = {}
    for finding in sorted(findings, key=lambda one: SEVERITIES.index(one.severity)):
        first.setdefault((finding.kind, finding.file, finding.line), finding)
    return tuple(first.values())
