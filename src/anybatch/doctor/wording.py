"""A diagnosis as text, as SARIF 2.1.0 and as annotations of GitHub Actions."""

import os
import textwrap
from collections import Counter
from typing import Any
from urllib.parse import quote

from anybatch.display import plural
from anybatch.doctor.finding import Finding
from anybatch.doctor.judging import Diagnosis, describe_update
from anybatch.doctor.loops import WatchedLoop

WIDTH = 100
SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
SHOWN = 3  # updates described one by one
ENDED = {
    "finished": "The script ran to its end",
    "updates": "The script was ended after the updates asked for",
    "error": "The script failed",
    "killed": "The script was killed",
}


def describe(diagnosis: Diagnosis) -> str:
    """Return the updates and the findings as text for a terminal."""
    lines = [line for loop in diagnosis.loops[:1] for line in _seen(loop, len(diagnosis.loops))]
    for finding in diagnosis.findings:
        lines += ["", *_finding(finding)]
    with_anybatch = next((finding.anybatch_fix for finding in diagnosis.findings if finding.anybatch_fix), "")
    if with_anybatch:
        lines += ["", f"With {with_anybatch}"]
    counts = diagnosis.num_findings.items()
    summary = ", ".join(plural(count, severity) if count else f"no {severity}s" for severity, count in counts)
    text = "\n".join([*lines, "", summary])
    # names come from scripts and logs, and must not control the terminal
    return "".join(letter if letter == "\n" or letter.isprintable() else f"\\x{ord(letter):02x}" for letter in text)


def _finding(finding: Finding) -> list[str]:
    where = f"{_relative(finding.file)}:{finding.line}" if finding.file else ""
    ranks = finding.evidence.get("ranks", ())
    on_ranks = f"  (rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))})" if ranks else ""
    head = f"{finding.severity:<8} {finding.kind}  {where}{on_ranks}".rstrip()
    body = textwrap.wrap(finding.message, WIDTH - 9)
    fix = finding.own_fix.splitlines()
    marked = [f"fix: {fix[0]}", *(f"     {line}" for line in fix[1:])] if fix else []
    return [head, *(f"         {line}" for line in [*body, *marked])]


def _seen(loop: WatchedLoop, num_ranks: int) -> list[str]:
    ranks = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
    lines = [
        f"{ENDED.get(loop.reason, 'The script ended')}: {len(loop.passes)} backward passes and {len(loop.updates)} "
        f"updates seen{ranks}.{_cut_short(loop)}",
        "An update is one optimizer.step(); the weights of the losses that it learns from should add up to 1.",
    ]
    for update in map(describe_update, loop.updates[:SHOWN]):
        parts = update["micro_batches"]
        shares = ", ".join("?" if part["weight"] is None else f"{part['weight']:.3g}" for part in parts[:8])
        total = update["weights_add_up_to"]
        weights = (
            "" if total is None else f", weights {shares}{', ...' if len(parts) > 8 else ''}: together {total:.2f}"
        )
        old = f" and {update['stale']} of before, not cleared" if update["stale"] else ""
        number = plural(len(parts), "micro-batch")
        lines.append(f"  update {update['update']}: {number}{old}{weights}{_between(update['events'])}")
    return lines


def _cut_short(loop: WatchedLoop) -> str:
    """Name the epochs that `--short-epochs` ended early."""
    whole = {epoch["loader"]: epoch.get("whole") or 0 for epoch in loop.epochs}
    cut = [end for end in loop.epoch_ends if end["fetched"] < whole.get(end["loader"], 0)]
    if not cut:
        return ""
    return f" Epochs of {whole[cut[0]['loader']]:,} micro-batches were cut to {cut[0]['fetched']} (--short-epochs)."


def _between(events: list[dict[str, object]]) -> str:
    """List the actions within an update, without the one clearing that belongs there."""
    counts = Counter(str(event["what"]) for event in events)
    if counts["zero"] < 2:
        del counts["zero"]
    listed = ", ".join(f"{count}x {what}" if count > 1 else what for what, count in counts.items())
    return f"; between: {listed}" if listed else ""


def as_sarif(diagnosis: Diagnosis, version: str) -> dict[str, Any]:
    """Return a SARIF log with one run and a rule per kind."""
    kinds = sorted({finding.kind for finding in diagnosis.findings})
    driver = {"name": "anybatch doctor", "version": version, "rules": [{"id": kind} for kind in kinds]}
    results = [_result(finding) for finding in diagnosis.findings]
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}


def _result(finding: Finding) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": finding.kind,
        "level": finding.severity,
        "message": {"text": f"{finding.message}\n\n{finding.fix}".strip()},
    }
    if finding.file:
        uri = quote(_relative(finding.file).replace(os.sep, "/"))
        place = {"artifactLocation": {"uri": uri}, "region": {"startLine": max(1, finding.line)}}
        result["locations"] = [{"physicalLocation": place}]
    return result


def as_github(diagnosis: Diagnosis) -> str:
    """Return one workflow command per finding, escaped as GitHub requires."""
    lines = []
    for finding in diagnosis.findings:
        level = {"error": "error", "warning": "warning", "note": "notice"}[finding.severity]
        file = _escaped(_relative(finding.file).replace(os.sep, "/")).replace(":", "%3A").replace(",", "%2C")
        lines.append(
            f"::{level} file={file},line={max(1, finding.line)},title={finding.kind}::{_escaped(finding.message)}"
        )
    return "\n".join(lines)


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _relative(file: str) -> str:
    relative = os.path.relpath(file) if file else ""
    return file if relative.startswith("..") else relative
